import math


def angular_importance(c): return [math.acos(max(-1,min(1,x)))/math.pi for x in c]
def preserve_importance(t, mean):
    L=len(t); w=[0.0]*L; active=set(range(L)); B=L*mean
    while active:
        s=sum(t[j] for j in active)
        prop={l:(t[l]/s*B if s>0 else B/len(active)) for l in active}
        over=[l for l in active if prop[l]>1]
        if not over:
            for l in active: w[l]=prop[l]
            break
        for l in over: w[l]=1.0; B-=1; active.discard(l)
    return w
