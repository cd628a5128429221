from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Knob:
    layer:int; group:str; name:str; cap:int; multiple:int; cost: Callable
    @property
    def key(self): return (self.layer,self.group,self.name)
def solve_ratio(cost_at,target):
    lo,hi=0.0,1.0
    for _ in range(60):
        m=(lo+hi)/2
        if cost_at(m)<=target: lo=m
        else: hi=m
    return lo
def fit_ranks(knobs, wants, target):
    r={k.key:max(1,int(wants[k.key])) for k in knobs}
    tot=sum(k.cost(r[k.key]) for k in knobs)
    for k in sorted(knobs,key=lambda k: k.cost(2)-k.cost(1),reverse=True):
        if r[k.key]<k.cap and tot+k.cost(r[k.key]+1)-k.cost(r[k.key])<=target:
            tot+=k.cost(r[k.key]+1)-k.cost(r[k.key]); r[k.key]+=1
    return r
