import numpy as np, pytest
from tests.training.test_matrix import *
def test_probe(bench):
    base={}
    for c in COMBINATIONS:
        r=bench.results(1,c)
        for t,tr in r.items():
            b=base.setdefault(t,tr)
            lp=[i for i,(x,y) in enumerate(zip(tr.logprobs,b.logprobs)) if any((p!=q).any() for p,q in zip(x,y))]
            lo=[i for i,(x,y) in enumerate(zip(tr.losses,b.losses)) if x!=y]
            w=[i for i,(x,y) in enumerate(zip(tr.weights,b.weights)) if any((x[k]!=y[k]).any() for k in x)]
            print(c,t,"loss",lo,"logp",lp,"weights",w)
