"""Factors a source model's weights by plain SVDs, and multiplies the factors to source-shaped weights.

All computations are written out here, in float64; the product's kernels have other tests.

D hidden, H query heads, G KV heads, d head_dim, N MLP width, n heads of a role, p roles of a core, r rank.
"""

from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from transformers import PreTrainedConfig, StaticCache

from tests.serving.serving_compressed import compress
from tests.serving.serving_sources import build, describe, layer_prefix, make_source, padded_batch, role_name

Forms = list[dict[str, Any]]
# By role: the families with G = H get one core for q, k, v and o, the others two.
ONE_CORE, TWO_CORES, MLP_CORE = ("q", "k", "v", "o"), (("q", "o"), ("k", "v")), ("gate", "up", "down")


@dataclass(frozen=True)
class Sizes:
    """The sizes of a tiny source."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    roles: tuple[str, ...]
    biases: tuple[str, ...]

    def out(self, role: str) -> int:
        query, key = self.heads * self.head_dim, self.kv_heads * self.head_dim
        widths = {"q": query, "k": key, "v": key, "o": self.hidden, "gate": self.inner, "up": self.inner}
        return widths.get(role, self.hidden)


def sizes_of(source: PreTrainedConfig) -> Sizes:
    fields = describe(source)
    names = ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size")
    return Sizes(*(fields[n] for n in names), (*fields["block"]["modules"],), (*fields["block"]["biases"],))


def factored(name: str, kind: Any, share: float, seed: int = 0, **options: Any) -> tuple[Any, Any]:
    """Return (model, reference).

    The model is the source with the forms of `kind(sizes, share)` in each layer; the reference is the source with
    products of the factors as weights.
    """
    source, forms, ours, reference = _factored(name, tuple(kind) if isinstance(kind, list) else kind, share, seed)
    model, source = build(source.config, ours, deepcopy(forms), **options), deepcopy(source)
    source.load_state_dict(reference)
    return model, source


@cache
def _factored(name: str, kind: Any, share: float, seed: int) -> tuple[Any, Forms, dict[str, Tensor], dict[str, Tensor]]:
    """Return (source, forms, tensors of the model, tensors of the reference), computed once for all tests of a file."""
    source = make_source(name, seed)
    forms = forms_of(source.config, kind, share)
    return source, forms, *factorise(source.config, source.state_dict(), forms)


def forms_of(source: PreTrainedConfig, kind: Any, share: float) -> Forms:
    """Return the layers' forms. `kind`: a function of sizes and kept share, or one such function for each layer."""
    kinds = [kind] * 3 if callable(kind) else kind
    sizes = sizes_of(source)
    return [{role: s for role, s in one(sizes, share).items() if role in sizes.roles} for one in kinds]


def factorise(
    source: PreTrainedConfig, tensors: dict[str, Tensor], forms: Forms
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the tensors of a lamina checkpoint with these forms, and source-shaped tensors that compute the same."""
    ours, reference = compress(source, tensors, [_before_factors(layer) for layer in forms])
    for layer_idx, layer in enumerate(forms):
        _Layer(source, layer_idx, layer, ours, reference).factorise()
    return ours, reference


def _before_factors(layer: dict[str, Any]) -> dict[str, Any]:
    """Return the forms that `solve` creates, alone or inside of the factors of a role."""
    before = {}
    for role, spec in layer.items():
        if "value_rank" in spec:
            before[role] = {"form": "head_pca", "rank": spec["value_rank"]}
        elif "width" in spec:
            before[role] = {"form": "pruned", "rank": spec["width"]}
        elif spec["form"] in ("head_pca", "pruned", "head_low_rank"):
            before[role] = spec
    return before


class _Layer:
    """Factorises the roles of one layer in place of the two dictionaries."""

    def __init__(self, source: PreTrainedConfig, layer_idx: int, forms: dict[str, Any], *both: dict[str, Tensor]):
        self.sizes, self.forms, (self.ours, self.reference) = sizes_of(source), forms, both
        self.names = {role: role_name(source, layer_idx, role) for role in self.sizes.roles}
        self.prefix = layer_prefix(source, layer_idx)
        self.kept = self.reference[self.names["down"] + ".weight"].any(dim=0).nonzero().squeeze(1)  # channels

    def factorise(self) -> None:
        tucker = [role for role, spec in self.forms.items() if spec["form"] == "tucker"]
        for roles in (ONE_CORE, MLP_CORE):
            if mine := [role for role in roles if role in tucker]:
                self._tucker(mine)
        for role, spec in self.forms.items():
            form = spec["form"]
            if form == "low_rank" or (form == "latent" and not spec.get("absorbed")):
                self._low_rank([role], spec["rank"])
            elif form == "latent":
                self._absorbed(spec["rank"])
            elif form == "pivoted" and role in ("q", "o", "up", "down"):
                self._pivoted([r for r, other in self.forms.items() if other is spec or other == spec], spec)
            elif form == "joint_low_rank" and role in ("q", "gate"):
                self._low_rank([role, {"q": "k", "gate": "up"}[role]], spec["rank"])
            elif form == "joint_head_low_rank" and role == "q":
                self._joint_head_low_rank(spec["rank"])

    def _take(self, role: str) -> Tensor:
        return self.ours.pop(self.names[role] + ".weight").double()

    def _put(self, role: str, suffix: str, tensor: Tensor) -> None:
        self.ours[f"{self.names[role]}.{suffix}"] = tensor.float().contiguous()

    def _replace(self, role: str, weight: Tensor) -> None:
        """Set the reference's weight: of the source's shape, with zeros for removed value dimensions and channels."""
        old = self.reference[self.names[role] + ".weight"]
        if role == "o" and weight.shape != old.shape:
            weight = weight.unflatten(1, (self.sizes.heads, -1))
            weight = torch.nn.functional.pad(weight, (0, self.sizes.head_dim - weight.shape[-1])).flatten(1)
        elif role in MLP_CORE and weight.shape != old.shape:
            dim = 1 if role == "down" else 0
            weight = old.double().index_copy(dim, self.kept, weight)
        self.reference[self.names[role] + ".weight"] = weight.float().contiguous()

    def _low_rank(self, roles: list[str], rank: int) -> None:
        taken = [self._take(role) for role in roles]
        first, second = _svd(torch.cat(taken), rank)
        self._put(roles[0], "first.weight", first)
        for role, part in zip(roles, second.split([len(weight) for weight in taken]), strict=True):
            self._put(role, "second.weight", part)
            self._replace(role, part @ first)

    def _pivoted(self, roles: list[str], spec: dict[str, Any]) -> None:
        """Truncate the stack to its rank; choose the longest remaining row by Gram-Schmidt; fit the others by least
        squares."""
        taken = [self._take(role) for role in roles]
        u, s, vh = torch.linalg.svd(torch.cat(taken), full_matrices=False)
        rank = spec["rank"]
        stack = u[:, :rank] * s[:rank] @ vh[:rank]
        left, chosen = stack.clone(), []
        for _ in range(rank):
            chosen.append(int(left.square().sum(1).argmax()))
            left -= torch.outer(left @ left[chosen[-1]], left[chosen[-1]]) / left[chosen[-1]].square().sum()
        indices = sorted(chosen)
        others = [row for row in range(len(stack)) if row not in chosen]
        module = f"{_parent([self.names[role] for role in self._all_of(roles)])}.{spec['group']}.pivoted"
        self.ours[f"{module}.rows.weight"] = stack[indices].float().contiguous()
        self.ours[f"{module}.indices"] = torch.tensor(indices, dtype=torch.int32)
        if others:
            coefficients = torch.linalg.lstsq(stack[indices].T, stack[others].T).solution.T
            self.ours[f"{module}.coefficients.weight"] = coefficients.float().contiguous()
        for role, part in zip(roles, stack.split([len(weight) for weight in taken]), strict=True):
            self._replace(role, part)

    def _all_of(self, roles: list[str]) -> list[str]:
        """Return all roles of the attention or the MLP that these roles belong to."""
        return [role for role in (ONE_CORE if roles[0] in ONE_CORE else MLP_CORE) if role in self.sizes.roles]

    def _absorbed(self, rank: int) -> None:
        """Store v's first factor; fold its second one into o (D, H·r), and v's bias through o into o's bias."""
        sizes = self.sizes
        first, second = _svd(self._take("v"), rank)
        self._put("v", "first.weight", first)
        self._replace("v", second @ first)
        groups = sizes.heads // sizes.kv_heads
        second_Hdr = second.unflatten(0, (sizes.kv_heads, -1)).repeat_interleave(groups, 0)
        o_DHd = self._take("o").unflatten(1, (sizes.heads, -1))
        self._put("o", "weight", torch.einsum("xhd,hdr->xhr", o_DHd, second_Hdr).flatten(1))
        bias = self.ours.pop(self.names["v"] + ".bias", None)
        if bias is not None:
            bias_Hd = bias.double().unflatten(0, (sizes.kv_heads, -1)).repeat_interleave(groups, 0)
            old = self.ours.get(self.names["o"] + ".bias", torch.zeros(sizes.hidden))
            self._put("o", "bias", old.double() + torch.einsum("xhd,hd->x", o_DHd, bias_Hd))

    def _joint_head_low_rank(self, rank: int) -> None:
        heads = self.sizes.heads
        stack_HxD = torch.cat([self._take(role).unflatten(0, (heads, -1)) for role in ("q", "k")], 1)
        first_HrD, second_Hxr = _svd(stack_HxD, rank)
        self._put("q", "first.weight", first_HrD.flatten(0, 1))
        for role, part in zip(("q", "k"), second_Hxr.split(self.sizes.head_dim, 1), strict=True):
            self._put(role, "second", part)
            self._replace(role, (part @ first_HrD).flatten(0, 1))

    # Tucker: an HOSVD. Weights as (D, d, n), or (D, N, 1) for the MLP; columns that o and down write come transposed.

    def _cube(self, role: str) -> Tensor:
        weight = self._take(role)
        weight_DC = weight if role in ("o", "down") else weight.T
        return weight_DC.unflatten(1, (self._heads(role), -1)).transpose(1, 2)

    def _heads(self, role: str) -> int:
        return {"q": self.sizes.heads, "o": self.sizes.heads, "k": self.sizes.kv_heads, "v": self.sizes.kv_heads}.get(
            role, 1
        )

    def _tucker(self, roles: list[str]) -> None:
        spec, sizes = self.forms[roles[0]], self.sizes
        prefix = self.names[roles[0]].rpartition(".")[0] + ".tucker."
        if roles[-1] == "down" and self.names["down"].removeprefix(self.prefix).count(".") == 0:
            prefix = self.prefix + "mlp_factors.tucker."  # fc1 and fc2 are in the layer itself
        if roles[0] != "q" or sizes.heads == sizes.kv_heads:
            groups = {"": tuple(roles)}
        else:
            groups = {"_qo": TWO_CORES[0], "_kv": TWO_CORES[1]}
        if spec.get("own_output"):
            groups = {{"_qo": "_q"}.get(k, k): tuple(r for r in g if r != "o") for k, g in groups.items()}
            self._group(prefix, {"_o": ("o",)}, spec, (*spec["ranks_o"], 1), "_o")
        self._group(prefix, groups, spec, spec["ranks"], "")

    def _group(self, prefix: str, groups: dict[str, Any], spec: Any, ranks: Any, own: str) -> None:
        """Store cores with common first and second factors.

        `own`: the suffix of these; given, there is no third factor.
        """
        cubes = {s: torch.stack([self._cube(role) for role in g], 2) for s, g in groups.items()}  # (D, d, p, n)
        first = _basis(torch.cat([c.flatten(1) for c in cubes.values()], 1), ranks[0])
        second = _basis(torch.cat([c.transpose(0, 1).flatten(1) for c in cubes.values()], 1), ranks[1])
        self.ours[f"{prefix}first{own}"], self.ours[f"{prefix}second{own}"] = first.float(), second.float()
        for suffix, cube in cubes.items():
            third = _basis(cube.transpose(0, 2).flatten(1), min(ranks[2], cube.shape[2]))
            core = torch.einsum("xypn,xa,yb,pc->abcn", cube, first, second, third)
            if own:
                core, third = core * third.item(), torch.ones_like(third)  # it is ±1
            else:
                self.ours[f"{prefix}third{suffix}"] = third.float()
            if spec.get("sparse"):
                core, values, mask = sparse_core(core, spec[f"nnz{suffix}"])
                self.ours[f"{prefix}core{suffix}.values"] = values.float()
                self.ours[f"{prefix}core{suffix}.mask"] = mask
            else:
                self.ours[f"{prefix}core{suffix}"] = core.float().contiguous()
            product = torch.einsum("abcn,xa,yb,pc->pxny", core, first, second, third).flatten(2)
            for role, weight in zip(groups[suffix], product, strict=True):
                self._replace(role, weight if role in ("o", "down") else weight.T)


def sparse_core(core: Tensor, nnz: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the nnz largest entries: dense with zeros, in C order, and as a bitmap, least significant bit first."""
    flat = core.flatten()
    kept = flat.abs().topk(nnz).indices.sort().values
    is_kept = np.isin(np.arange(flat.numel()), kept)
    mask = torch.from_numpy(np.packbits(is_kept, bitorder="little"))
    return torch.zeros_like(flat).index_put((kept,), flat[kept]).view_as(core), flat[kept], mask


def _svd(weight: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Return the factors (…, r, in) and (…, out, r), with zeros if the weight has fewer singular values than r."""
    u, s, vh = torch.linalg.svd(weight, full_matrices=False)
    missing = max(rank - s.shape[-1], 0)
    first, second = vh[..., :rank, :], u[..., :rank] * s[..., None, :rank]
    return torch.nn.functional.pad(first, (0, 0, 0, missing)), torch.nn.functional.pad(second, (0, missing))


def _parent(paths: list[str]) -> str:
    """Return the deepest module that contains all of these."""
    parts = [path.split(".")[:-1] for path in paths]
    return ".".join(names[0] for names in zip(*parts, strict=False) if len({*names}) == 1)


def _basis(unfolded: Tensor, rank: int) -> Tensor:
    """Return the leading left singular vectors."""
    return torch.linalg.svd(unfolded, full_matrices=False)[0][:, :rank].contiguous()


# Kinds: forms of a layer from the sizes and the share of the full rank that is kept ---------------------------------


def _rank(full: int, share: float) -> int:
    return max(1, round(full * share))


def low_rank(sizes: Sizes, share: float) -> dict[str, Any]:
    widths = {"o": sizes.heads * sizes.head_dim, "down": sizes.inner}
    roles = (role for role in (*ONE_CORE, *MLP_CORE) if role in sizes.roles)
    full = {role: min(sizes.out(role), widths.get(role, sizes.hidden)) for role in roles}
    return {role: {"form": "low_rank", "rank": _rank(n, share)} for role, n in full.items()}


def joint(sizes: Sizes, share: float) -> dict[str, Any]:
    forms = {}
    for group, pair in (("query_key", ("q", "k")), ("gate_up", ("gate", "up"))):
        if pair[0] in sizes.roles:
            rank = _rank(min(sizes.hidden, sum(map(sizes.out, pair))), share)
            forms |= {role: {"form": "joint_low_rank", "rank": rank, "group": group} for role in pair}
    return forms


def joint_head(sizes: Sizes, share: float) -> dict[str, Any]:
    rank = _rank(min(sizes.hidden, 2 * sizes.head_dim), share)
    return {role: {"form": "joint_head_low_rank", "rank": rank, "group": "query_key"} for role in ("q", "k")}


def pivoted(sizes: Sizes, share: float) -> dict[str, Any]:
    """Pivoted factors of all projections but v, stacked where they share their input."""
    return _pivoted_stacks(sizes, share, sizes.head_dim, sizes.inner)


def pivoted_in_bases(sizes: Sizes, share: float) -> dict[str, Any]:
    """Return the forms of `pivoted`, with v and o in another basis, and with pruned channels."""
    value_rank, width = _rank(sizes.head_dim, share), _rank(sizes.inner, share)
    forms = _pivoted_stacks(sizes, share, value_rank, width)
    forms["o"] = {**forms["o"], "value_rank": value_rank}
    forms |= {role: {**forms[role], "width": width} for role in MLP_CORE}
    return forms | {"v": {"form": "head_pca", "rank": value_rank}}


def _pivoted_stacks(sizes: Sizes, share: float, value_rank: int, width: int) -> dict[str, Any]:
    readers = [role for role in ("gate", "up") if role in sizes.roles]
    ranks = {
        "query_key": min(sizes.hidden, sizes.out("q") + sizes.out("k")),
        "output": min(sizes.heads * value_rank, sizes.hidden),
        "gate_up": min(sizes.hidden, width * len(readers)),
        "down": min(width, sizes.hidden),
    }
    roles = {"query_key": ("q", "k"), "output": ("o",), "gate_up": ("gate", "up"), "down": ("down",)}
    return {
        role: {"form": "pivoted", "rank": _rank(ranks[group], share), "group": group}
        for group, members in roles.items()
        for role in members
    }


def low_rank_in_bases(sizes: Sizes, share: float) -> dict[str, Any]:
    """Return forms of plain factors, with value heads in another basis and pruned channels; gate and up share
    factors."""
    value_rank, width = _rank(sizes.head_dim, share), _rank(sizes.inner, share)
    down = {"form": "low_rank", "rank": _rank(min(width, sizes.hidden), share), "width": width}
    forms = {
        "v": {"form": "head_pca", "rank": value_rank},
        "o": {
            "form": "low_rank",
            "rank": _rank(min(sizes.heads * value_rank, sizes.hidden), share),
            "value_rank": value_rank,
        },
        "up": down,
        "down": down,
    }
    if "gate" in sizes.roles:
        rank = _rank(min(sizes.hidden, 2 * width), share)
        pair = {"form": "joint_low_rank", "rank": rank, "group": "gate_up", "width": width}
        forms |= {"gate": pair, "up": pair}
    return forms


def _latent(sizes: Sizes, share: float, **fields: Any) -> dict[str, Any]:
    return {"form": "latent", "rank": _rank(min(sizes.hidden, sizes.out("k")), share), **fields}


def latent_keys(sizes: Sizes, share: float) -> dict[str, Any]:
    return {"k": _latent(sizes, share)}


def latent_values(sizes: Sizes, share: float) -> dict[str, Any]:
    return {"v": _latent(sizes, share)}


def latent_both(sizes: Sizes, share: float) -> dict[str, Any]:
    return {"k": _latent(sizes, share), "v": _latent(sizes, share**1.3, absorbed=False)}


def absorbed(sizes: Sizes, share: float) -> dict[str, Any]:
    v = _latent(sizes, share, absorbed=True)
    return {"v": v, "o": {"form": "absorbed", "rank": v["rank"]}}


def latent_keys_absorbed_values(sizes: Sizes, share: float) -> dict[str, Any]:
    return latent_keys(sizes, share**1.3) | absorbed(sizes, share)


def latent_keys_narrow_values(sizes: Sizes, share: float) -> dict[str, Any]:
    narrow = {"form": "head_pca", "rank": _rank(sizes.head_dim, share)}
    return latent_keys(sizes, share) | {"v": narrow, "o": narrow}


def narrow_keys_latent_values(sizes: Sizes, share: float) -> dict[str, Any]:
    ranks = {role: {"form": "head_low_rank", "rank": _rank(sizes.head_dim, share)} for role in ("q", "k")}
    return ranks | latent_values(sizes, share)


def tucker(sizes: Sizes, share: float, sparse: bool = False, own: bool = False) -> dict[str, Any]:
    """Return Tucker forms of attention and MLP.

    `sparse`: each core keeps `share` of its entries, and only R1 is reduced.
    """
    rank_1, rank_2 = _rank(sizes.hidden, share), sizes.head_dim if sparse else _rank(sizes.head_dim, share)
    third = (3 if own else 4) if sparse or share == 1 else 2
    attention: dict[str, Any] = {"form": "tucker", "ranks": [rank_1, rank_2, third], "sparse": sparse}
    heads, kv_heads = sizes.heads, sizes.kv_heads
    if heads == kv_heads:
        cores = {"nnz": third * heads}
    else:
        cores = {"nnz_q": heads} if own else {"nnz_qo": 2 * heads}
        cores["nnz_kv"] = 2 * kv_heads
    nnz = {key: _rank(rank_1 * rank_2 * n, share) for key, n in cores.items()}
    if own:
        rank_o = _rank(sizes.hidden, share)
        attention |= {"own_output": True, "ranks_o": [rank_o, rank_2]}
        nnz["nnz_o"] = _rank(rank_o * rank_2 * heads, share)
    mlp_roles = [role for role in MLP_CORE if role in sizes.roles]
    ranks = [rank_1, _rank(sizes.inner, share), len(mlp_roles) if share == 1 else 2]
    mlp = {"form": "tucker", "ranks": ranks, "sparse": sparse}
    if sparse:
        attention |= nnz
        mlp["nnz"] = _rank(ranks[0] * ranks[1] * ranks[2], share)
    return dict.fromkeys(ONE_CORE, attention) | dict.fromkeys(mlp_roles, mlp)


def tucker_sparse(sizes: Sizes, share: float) -> dict[str, Any]:
    return tucker(sizes, share, sparse=True)


def tucker_own_output(sizes: Sizes, share: float) -> dict[str, Any]:
    return tucker(sizes, share, own=True)


def tucker_sparse_own_output(sizes: Sizes, share: float) -> dict[str, Any]:
    return tucker(sizes, share, sparse=True, own=True)


def dense(sizes: Sizes, share: float) -> dict[str, Any]:
    return {}


# Checks ---------------------------------------------------------------------------------------------------------------


def same_logits(model: Any, reference: Any, relative: float) -> None:
    """Compare logits on three sequences, unpadded and left-padded, with generate()'s positions and with default
    ones."""
    ids_BT, mask_BT = padded_batch()
    positions = (mask_BT.cumsum(1) - 1).clamp(min=0)
    for inputs in ({}, {"attention_mask": mask_BT}, {"attention_mask": mask_BT, "position_ids": positions}):
        with torch.no_grad():
            ours, theirs = (one(ids_BT, **inputs).logits[mask_BT.bool()] for one in (model, reference))
        assert (ours - theirs).abs().amax() <= relative * theirs.abs().amax()


def same_as_prefill(model: Any, num_new: int = 24, **options: Any) -> None:
    """Compare cached greedy decoding of a left-padded batch with one forward pass without a cache.

    Logits and tokens must be equal, also to those of each sequence alone, without padding.
    """
    ids_BT, mask_BT = padded_batch()
    out = model.generate(
        ids_BT, attention_mask=mask_BT, max_new_tokens=num_new, do_sample=False, eos_token_id=None,
        output_logits=True, return_dict_in_generate=True, **options,
    )  # fmt: skip
    steps_BTV = torch.stack(out.logits, dim=1)
    whole_BT = torch.cat((mask_BT, torch.ones(3, num_new, dtype=torch.long)), dim=1)
    positions = (whole_BT.cumsum(1) - 1).clamp(min=0)
    rows = [model(out.sequences[i : i + 1, whole_BT[i].bool()], use_cache=False).logits[0] for i in range(3)]
    once_BTV = model(out.sequences, attention_mask=whole_BT, position_ids=positions, use_cache=False).logits
    alone_BTV = torch.stack([row[-num_new - 1 :] for row in rows])
    for other_BTV in (once_BTV[:, -num_new - 1 :], alone_BTV):
        assert (other_BTV[:, :-1] - steps_BTV).abs().amax() <= 1e-4
        assert torch.equal(other_BTV[:, :-1].argmax(-1), out.sequences[:, -num_new:])


def compiled_is_eager(model: Any) -> int:
    """Compare compiled with eager decoding, token by token with a static cache. Return the number of graphs."""
    ids_BT, mask_BT = padded_batch()
    mask_BS = torch.nn.functional.pad(mask_BT, (0, 6), value=1)  # of one length: the causal mask hides what is to come
    caches = [StaticCache(model.config, max_cache_len=20) for _ in range(2)]
    torch.compiler.reset()
    graphs = CompileCounter()
    step: Any = torch.compile(model, backend=graphs, fullgraph=True)
    positions = (mask_BT.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        for cache in caches:
            model(ids_BT[:, :11], attention_mask=mask_BS, position_ids=positions[:, :11], past_key_values=cache)
        for t in (11, 12, 13):
            now = {"attention_mask": mask_BS, "position_ids": positions[:, t : t + 1]}
            fast, slow = (
                one(ids_BT[:, t : t + 1], past_key_values=cache, **now).logits
                for one, cache in zip((step, model), caches, strict=True)
            )
            assert (fast - slow).abs().amax() <= 2e-5
    return graphs.frame_count
