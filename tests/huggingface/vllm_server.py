"""A server that speaks the HTTP protocol by which TRL's `VLLMClient` reaches vLLM, and samples from what it is sent.

What NCCL carries between trainer and workers is posted too, since it needs GPUs.
"""

from __future__ import annotations

import json
import sys
import threading
import urllib.error
import urllib.parse
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any

import torch

from tests.support.models import build

Answer = dict[str, Any]


class Server:
    """What vLLM serves of one model, whose weights come from a trainer; a call out of order is answered by an error."""

    def __init__(self) -> None:
        self.model, self.joined, self.updates, self.asked = build("Llama", seed=9).eval(), 0, 0, 0
        self.updating, self.came = False, dict[str, torch.Tensor]()
        self.http = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
        self.http.daemon_threads = True
        vars(self.http)["of"] = self
        threading.Thread(target=self.http.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}"

    def close(self) -> None:
        self.http.shutdown()
        self.http.server_close()

    def get(self, path: str) -> Answer:
        config = {"logprobs_mode": "processed_logprobs"}
        return {
            "/health": {},
            "/v1/models": {"data": [{"id": "tiny"}]},
            "/get_world_size": {"world_size": 1},
            "/server_info": {"vllm_config": {"model_config": config, "weight_transfer_config": {"backend": "nccl"}}},
        }[path]

    def post(self, path: str, given: Answer) -> Answer:
        answer: Answer = getattr(self, path.strip("/").replace("/", "_"))(given)
        return answer

    def init_weight_transfer_engine(self, given: Answer) -> Answer:
        assert given["init_info"]["world_size"] == 2
        self.joined += 1
        assert self.joined == 1
        return {}

    def start_weight_update(self, given: Answer) -> Answer:
        assert not self.updating
        self.updating, self.came = True, {}
        return {}

    def tensor(self, given: Answer) -> Answer:
        """Take a tensor, as the workers do from NCCL."""
        assert self.joined
        assert self.updating
        self.came[given["name"]] = torch.tensor(given["values"]).reshape(given["shape"])
        return {}

    def update_weights(self, given: Answer) -> Answer:
        """Announce tensors: their request is answered before or after they come."""
        info, own = given["update_info"], dict(self.model.named_parameters())
        assert {name: tuple(shape) for name, shape in zip(info["names"], info["shapes"], strict=True)} == {
            name: tuple(own[name].shape) for name in own
        }
        assert {*info["dtype_names"]} == {"float32"}
        return {}

    @torch.no_grad()
    def finish_weight_update(self, given: Answer) -> Answer:
        for name, parameter in self.model.named_parameters():
            parameter.copy_(self.came.pop(name))
        assert not self.came
        self.updating, self.updates = False, self.updates + 1
        return {}

    def reset_prefix_cache(self, given: Answer) -> Answer:
        return {}

    @torch.no_grad()
    def v1_completions(self, given: Answer) -> Answer:
        """Sample, by a seed that counts the requests."""
        assert self.updates
        assert not self.updating
        self.asked += 1
        noise = torch.Generator().manual_seed(self.asked)
        choices = []
        for prompt in given["prompt"]:
            rows, scores = torch.tensor([prompt] * given["n"]), list[torch.Tensor]()
            for _ in range(given["max_tokens"]):
                logprobs = (self.model(rows).logits[:, -1] / given["temperature"]).log_softmax(-1)
                drawn = (logprobs - torch.empty_like(logprobs).exponential_(generator=noise).log()).argmax(-1)[:, None]
                rows = torch.cat((rows, drawn), dim=1)
                scores.append(logprobs.gather(1, drawn))
            for tokens, of_row in zip(rows[:, len(prompt) :].tolist(), torch.cat(scores, 1).tolist(), strict=True):
                named = [f"token_id:{token}" for token in tokens]
                told = {"tokens": named, "token_logprobs": of_row, "top_logprobs": [None] * len(named)}
                told = None if given["logprobs"] is None else told
                choices.append(
                    {
                        "prompt_token_ids": prompt,
                        "token_ids": tokens,
                        "logprobs": None if given["logprobs"] is None else told,
                    }
                )
        return {"choices": choices}


class _Handler(BaseHTTPRequestHandler):
    def _answer(self, answer: Any) -> None:
        try:
            status, body = 200, json.dumps(answer())
        except Exception as error:  # noqa: BLE001 (of any kind: the client shows it)
            status, body = 400, repr(error)
        self.send_response(status)
        self.end_headers()
        self.wfile.write(body.encode())

    def do_GET(self) -> None:
        self._answer(lambda: vars(self.server)["of"].get(self.path.partition("?")[0]))

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self._answer(lambda: vars(self.server)["of"].post(self.path, json.loads(body or "{}")))

    def log_message(self, *_: Any) -> None:
        pass


def _request(url: str, json_: Any = None, post: bool = False) -> Any:
    """What `requests` answers."""
    asked = urllib.request.Request(url, data=json.dumps(json_ or {}).encode() if post else None)  # noqa: S310
    try:
        with urllib.request.urlopen(asked) as found:  # noqa: S310
            status, body, headers = found.status, found.read().decode(), dict(found.headers)
    except urllib.error.HTTPError as error:
        status, body, headers = error.code, error.read().decode(), {}
    return SimpleNamespace(status_code=status, text=body, headers=headers, json=lambda: json.loads(body))


class _Session:
    def mount(self, *_: Any) -> None:
        pass

    def get(self, url: str, params: dict[str, str] | None = None) -> Any:
        return _request(f"{url}?{urllib.parse.urlencode(params or {})}")

    def post(self, url: str, json: Any = None) -> Any:
        return _request(url, json, post=True)


class _Engine:
    """In place of vLLM's over NCCL."""

    @staticmethod
    def trainer_send_weights(iterator: Any, trainer_args: str) -> None:
        for name, value in iterator:
            sent = {"name": name, "values": value.detach().flatten().tolist(), "shape": [*value.shape]}
            assert _request(f"{trainer_args}/tensor", sent, post=True).status_code == 200


def let_trl_find_vllm() -> None:
    """Give TRL's own client what it imports of vLLM and requests, which are not installed, and what needs a GPU."""
    from trl.generation import vllm_client

    def init_communicator(client: Any, device: Any) -> None:
        assert client.get_server_info()["weight_transfer_config"] is not None
        told = {"rank_offset": 1, "world_size": client.get_world_size() + 1}
        client._post(f"{client.base_url}/init_weight_transfer_engine", json={"init_info": told})
        client.communicator = client.base_url

    stand_ins = SimpleNamespace(
        Session=_Session, get=_request, exceptions=SimpleNamespace(RequestException=urllib.error.URLError)
    )
    vars(vllm_client).update(
        requests=stand_ins, HTTPAdapter=lambda **_: None, Retry=lambda **_: None, is_requests_available=lambda: True,
        NCCLWeightTransferEngine=_Engine,
        NCCLTrainerSendWeightsArgs=lambda group, packed: group,
    )  # fmt: skip
    vllm_client.VLLMClient.init_communicator = init_communicator
    for name, module in [*sys.modules.items()]:
        if name.startswith("trl.") and "is_vllm_available" in vars(module):
            vars(module)["is_vllm_available"] = lambda: True
