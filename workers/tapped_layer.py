"""One decoder layer on a device: built from tensors, run on a micro-batch, with taps for the statistics.

Legend: B micro-batch, S sequence, D hidden, F features at a tap.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from copy import copy
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lamina import LayersConfig
from lamina.factored_lamina import stored_state
from lamina.mixture_lamina import split_role
from lamina.rotary_lamina import Angles, make_rotary, rotation_of
from manifests.errors import NumericsError
from pipeline.families.blocks import ROUTING
from pipeline.families.layer_geometry import LayerGeometry
from pipeline.kernels.checks import all_finite, extremes
from pipeline.kernels.refit import evenly_spread
from pipeline.methods.method import Moment
from workers.branched_layer import BranchedLayer, Places
from workers.memory import return_freed_pages
from workers.wide_linear import widen_again_, widen_linears_

Tap = Callable[[Tensor], None]
Taps = Sequence[tuple[str, Callable[..., None]]]  # points, and functions that receive their values
Load = Callable[[int, int], Mapping[str, Tensor]]  # number of a slice, and step to the next as in `hold` -> its tensors


class StopForward(Exception):
    """Ends a forward pass after the last tap, if the layer's output is not needed."""


class TappedLayer:
    """A decoder layer on a device, dense or compressed. Taps see inputs and outputs of its modules."""

    def __init__(
        self,
        config: LayersConfig,
        geometry: LayerGeometry,
        tensors: Mapping[str, Tensor],
        device: torch.device,
        slices: Sequence[range] = (),
        load: Load | None = None,
    ) -> None:
        """Build the layer.

        Args:
            tensors: by names relative to the layer, already in the forward's dtype.
            slices: the experts of each slice, if there are too many to hold. The layer then has a part for each slice,
                `load` returns its tensors, and `tensors` has those of no expert.
        """
        self.index, self.geometry = geometry.index, geometry
        self.config = config
        self.device = device
        with torch.device("meta"):
            self.module = BranchedLayer(config, geometry.index)
        names = stored_state(self.module).keys()  # old checkpoints also hold buffers, such as rotary_emb.inv_freq
        placed = {name: tensor.to(device) for name, tensor in tensors.items() if name in names}
        self.slices = (*slices,) or (range(geometry.num_experts),)
        self.parts = len(self.slices)  # samples pass the layer in this many parts
        self.load, self.held = load, -1 if load else 0
        self.module.load_state_dict(placed, strict=load is None, assign=True)
        self.dtype = next(tensor.dtype for tensor in placed.values() if tensor.is_floating_point())
        widen_linears_(self.module, self.dtype, device)
        self.module.eval().requires_grad_(False)
        rotary = make_rotary(config, device) if config.rotates(geometry.index) else None
        self.rotary = rotary and rotation_of(rotary, config.layer_types[geometry.index])
        self.begins_behind_attention = False

    def behind_attention(self) -> TappedLayer:
        """Return the part of this layer behind its attention: its inputs are the residual stream that the MLP reads.
        Both have the same module."""
        rest = copy(self)
        rest.begins_behind_attention = True
        return rest

    @torch.inference_mode()
    def run(
        self,
        hidden_BSD: Tensor,
        taps: Iterable[tuple[str, Tap]] = (),
        output: bool = True,
        places: Places | None = None,
    ) -> Tensor | None:
        """Return the layer's output for hidden states of whole samples. `places`: of the tokens, if samples branch.

        With `output` off, the pass ends at the last tap and returns None. Raises NumericsError, naming layer and
        module, when the output, a query or a key is not finite.
        """
        taps = list(taps)
        with self.checked(hidden_BSD) as ends, self.tapped(taps, stop=not output):
            try:
                result_BSD = self._forward(hidden_BSD, None if output else self._tapped_parts(taps), places)
                ends.append(extremes(result_BSD))
            except StopForward:
                result_BSD = None
        return result_BSD if output else None

    @contextmanager
    def checked(self, hidden_BSD: Tensor) -> Iterator[list[Tensor]]:
        """Check queries, keys and the extremes that the block appends to the list, in a pass of these inputs.

        Raises NumericsError, naming the layer's first faulty tensor, on NaN or infinity.
        """
        with self._watched() as ends:
            yield ends
        if ends and not torch.isfinite(torch.stack(ends)).all():
            raise NumericsError(self._blame(hidden_BSD))

    def require_finite(self, output_BSD: Tensor, inputs: Callable[[], Tensor]) -> None:
        """Raise NumericsError, as `checked`, if an output is not finite. `inputs`: returns the layer's inputs."""
        if not torch.isfinite(extremes(output_BSD)).all():
            raise NumericsError(self._blame(inputs()))

    @contextmanager
    def every_expert(self) -> Iterator[None]:
        """Return a context in which taps see values of every expert on all tokens, regardless of the router."""
        self.module.every_expert = True
        try:
            yield
        finally:
            self.module.every_expert = False

    def angles(self, hidden_BSD: Tensor, places: Places | None = None) -> Angles | None:
        """Return the rotations of whole samples as cos and sin, or as foreign attention needs them; None without
        rotation."""
        positions_1S = torch.arange(hidden_BSD.shape[1], device=hidden_BSD.device).unsqueeze(0)
        positions_BS = positions_1S if places is None else places.positions
        return None if self.rotary is None else self.rotary(hidden_BSD, positions_BS)

    def _forward(self, hidden_BSD: Tensor, parts: Iterable[int] | None = None, places: Places | None = None) -> Tensor:
        """Return the output of all parts. `parts`: only those whose values taps need."""
        if self.parts == 1:
            if self.begins_behind_attention:
                stream: Tensor = self.module.behind_attention(hidden_BSD)
                return stream
            angles = self.angles(hidden_BSD, places)
            mask_BSS = None if places is None else places.mask(self.module.window)
            result: Tensor = self.module(hidden_BSD, position_embeddings=angles, attention_mask=mask_BSS)
            return result
        assert places is None, "samples do not branch in a layer with several parts"
        stream_BSD = hidden_BSD if self.begins_behind_attention else self.attended(hidden_BSD)
        x_TD, routing = self.module.routed(stream_BSD)
        out_TD: Tensor | None = None
        for number in range(self.parts) if parts is None else parts:
            out_TD = self.module.with_experts(x_TD, routing, out_TD, self.hold(number))
        return self.module.finished(stream_BSD, x_TD, x_TD if out_TD is None else out_TD)

    # -- parts -------------------------------------------------------------------------------------------------------

    def hold(self, number: int, step: int = 1) -> range:
        """Hold the experts of one part in place of another's. Return their numbers.

        `step`: from this part to the next one that will be held: 1, −1, or 0 if none follows.
        """
        if self.held != number:
            with torch.inference_mode(False), torch.no_grad():  # autograd accepts no tensors of inference mode
                self._replace_experts(number, step)
        return self.slices[number]

    def _replace_experts(self, number: int, step: int) -> None:
        assert self.load is not None
        for expert in self.slices[self.held] if self.held >= 0 else ():
            self._expert(expert).to_empty(device="meta")
        return_freed_pages()
        self.held, experts, names = -1, self.slices[number], stored_state(self.module).keys()
        placed = {name: tensor for name, tensor in self.load(number, step).items() if name in names}
        paths = tuple(f"{self._path(expert)}." for expert in experts)
        if missing := [name for name in names if name.startswith(paths) and name not in placed]:
            raise RuntimeError(f"layer {self.index} lacks {', '.join(missing[:3])}")
        dtypes = {name: self.dtype if tensor.is_floating_point() else tensor.dtype for name, tensor in placed.items()}
        placed = {name: tensor.to(dtypes[name]) for name, tensor in placed.items()}
        self.module.load_state_dict(placed, strict=False, assign=True)
        for expert in experts:
            widen_again_(self._expert(expert), self.dtype, self.device)
        self.held = number

    def _expert(self, expert: int) -> nn.Module:
        return self.module.get_submodule(self._path(expert))

    def _path(self, expert: int) -> str:
        assert self.config.mixture is not None
        return f"{self.config.mixture['experts']}.{expert}"

    def attended(self, hidden_BSD: Tensor) -> Tensor:
        """Return the residual stream (B, S, D) that the mixture reads."""
        return self.module.attended(hidden_BSD, self.angles(hidden_BSD))

    def _tapped_parts(self, taps: Iterable[tuple[str, Tap]]) -> list[int]:
        """Return the parts with experts that have taps."""
        if self.parts == 1:
            return [0]
        blocks = {split_role(self.geometry.tap(point)[0])[0] for point, _ in taps}
        return [
            number
            for number, experts in enumerate(self.slices)
            if any(f"experts.{expert}" in blocks for expert in experts)
        ]

    @contextmanager
    def _watched(self) -> Iterator[list[Tensor]]:
        """Collect the extremes of queries and keys, because attention kernels silently turn NaN scores into zeros."""
        ends: list[Tensor] = []
        with ExitStack() as hooks:
            for role in self.geometry.score_roles:
                taps = [lambda values: ends.append(extremes(values))]
                hooks.callback(_hook(self.module.role(role), "out", taps, lambda: None).remove)
            yield ends

    @contextmanager
    def tapped(self, taps: Iterable[tuple[str, Tap]], stop: bool) -> Iterator[None]:
        """Hook the taps onto the modules of their roles. With `stop`, the pass ends after the last tap."""
        resolved: dict[tuple[str, str], list[Tap]] = {}
        for point, tap in taps:
            seen = _routing_tap(point, tap) if point.endswith(ROUTING) else tap
            resolved.setdefault(self.geometry.tap(point), []).append(seen)
        awaited = set(resolved)

        def reached(point: tuple[str, str]) -> None:
            awaited.discard(point)
            if stop and not awaited:
                raise StopForward

        with ExitStack() as hooks:
            for (role, side), tap_list in resolved.items():
                handle = _hook(self.module.role(role), side, tap_list, partial(reached, (role, side)))
                hooks.callback(handle.remove)
            yield

    def _blame(self, hidden_BSD: Tensor) -> str:
        """Run the layer again and name the first module whose output is not finite."""
        if not all_finite(hidden_BSD):
            return f"layer {self.index}: its input holds NaN or infinity"
        bad: list[str] = []

        def watch(role: str) -> Tap:
            return lambda values: bad.append(role) if not all_finite(values) else None

        routing = {each.role for each in self.geometry.copied} - {*self.geometry.foreign_roles}
        roles = [role for role in self.geometry.roles if role not in routing]
        with self.tapped([(f"{role}.out", watch(role)) for role in roles], stop=False):
            self._forward(hidden_BSD)
        where = dict(self.geometry.modules)[bad[0]] if bad else "the residual sum"
        fault = f"layer {self.index}: NaN or infinity first appears in the output of {where}"
        return f"{fault} ({hidden_BSD.dtype}); {overflow_advice(hidden_BSD.dtype)}"


def sample_tap(moment: Moment, samples: dict[Moment, Tensor], token: int, tokens: int) -> Tap:
    """Return a tap that adds the values of sampled tokens to `samples`.

    `token`: the index, among all `tokens`, of the first token that the tap will see.
    """

    def keep(values_BSF: Tensor) -> None:
        nonlocal token
        rows_TF = values_BSF.flatten(0, -2)
        chosen = evenly_spread(token, len(rows_TF), tokens, moment.tokens)
        kept_TF = rows_TF[chosen.to(rows_TF.device)]
        samples[moment] = torch.cat((samples[moment], kept_TF[None]), dim=1) if moment in samples else kept_TF[None]
        token += len(rows_TF)

    return keep


def overflow_advice(dtype: torch.dtype) -> str:
    """Explain why activations are not finite, and what to change."""
    if dtype == torch.float16:
        return "weights or activations overflow this dtype: convert the checkpoint to bfloat16 or float32"
    return "the model's own activations overflow: its weights are damaged or wrong"


def _routing_tap(point: str, tap: Tap) -> Tap:
    """Return a tap at a router, or at the gate of a shared expert, that passes on the weight (T, 1) of one expert."""
    expert = point.removesuffix(ROUTING).rpartition(".")[2]

    def see(output: Any) -> None:
        if isinstance(output, Tensor):
            tap(output.sigmoid())
        else:
            weight_Tk, chosen_Tk = output
            tap((weight_Tk * (chosen_Tk == int(expert))).sum(dim=1, keepdim=True))

    return see


def _hook(module: nn.Module, side: str, taps: list[Tap], reached: Callable[[], None]) -> Any:
    def see(values: Tensor) -> None:
        for tap in taps:
            tap(values)
        reached()

    if side == "in":
        return module.register_forward_pre_hook(lambda _, arguments: see(arguments[0]))
    return module.register_forward_hook(lambda _, __, result: see(result))
