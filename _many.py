import sys, time
from tests.fuzz.frameworks import steps
from tests.fuzz.frameworks.megatron_step import draw
from collections import Counter
if __name__=="__main__":
    first, cases, seed = map(int, sys.argv[1:4])
    draws=[d for n in range(first, first+cases) if (d:=draw(seed,n)).pack in ("tree","mask")]
    c=Counter()
    steps.prepare("megatron")
    for d,o in steps.run("megatron", draws, 60.0, time.monotonic()+int(sys.argv[4])):
        c[(d.pack, str(getattr(o,"kind",o))[:60])]+=1
        if o.kind not in ("right",): print(d.number, d.pack, o, flush=True)
    print(len(draws), c)
