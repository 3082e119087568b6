"""A patched DeepSpeed honours the block in plain `deepspeed.initialize`, and without it is as it was."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

from tests.support.pages import ROOT
from tests.test_patches import git_apply

SCRIPT = """
import deepspeed
from dfa_megatron import deepspeed as dfa_ds
from dfa_megatron.errors import UnsupportedError
from tests.deepspeed import harness
from tests.support.models import build, text

assert deepspeed.__file__.startswith({folder!r}), deepspeed.__file__
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # nothing is compiled
deepspeed.init_distributed()

def start(config, **arguments):
    model = build("Llama")
    return deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config, **arguments)[0]

engine = start(harness.settings(2, 1, checkpoint="remat"))
assert dfa_ds.mesh_of(engine).size == 1
assert engine.module.config._attn_implementation == "dfa"
engine.backward(engine(**text(1, 8, seed=0)).loss)
engine.step()
without = harness.settings(2)
del without["dist_flash_attention"]
for config in (without, harness.settings(2, enabled=False)):
    assert start(config).module.config._attn_implementation == "eager"
for config, arguments in ((harness.settings(2, sizes=1), {{}}), (harness.settings(2), {{"mesh_param": (1, 1)}})):
    try:
        start(config, **arguments)
    except UnsupportedError as refused:
        print(refused)
    else:
        raise AssertionError(config)
"""


def test_a_patched_deepspeed_honours_the_block(tmp_path: Path) -> None:
    """The installed one, by links but for the file that the patch changes."""
    import deepspeed

    installed = Path(deepspeed.__file__).parent
    (tmp_path / "deepspeed").mkdir()
    for entry in installed.iterdir():
        (tmp_path / "deepspeed" / entry.name).symlink_to(entry)
    changed = tmp_path / "deepspeed" / "__init__.py"
    changed.unlink()
    changed.write_bytes((installed / "__init__.py").read_bytes())
    git_apply(ROOT / "patches" / "deepspeed" / f"v{importlib.metadata.version('deepspeed')}.patch", tmp_path)
    path = [str(tmp_path), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SCRIPT.format(folder=str(tmp_path))], cwd=tmp_path,
        env={
            **os.environ, "PYTHONPATH": os.pathsep.join(path), "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0",
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0",
        },
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "perhaps 'size'" in done.stdout
    assert "mesh_param with dist_flash_attention" in done.stdout
