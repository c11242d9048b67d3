"""Muon for stacks of matrices, such as the weights of group-tied layers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from lieattn._core.checks import check_arguments, check_number, check_positive

_COEFFICIENTS = 3.4445, -4.7750, 2.0315  # five steps take singular values from 0.002 to 1 close to 1
_STEPS = 5
_SIZE = 0.2  # root mean square of the entries of an update, divided by the rate; about as for AdamW


def _check_options(options: Mapping[str, Any]) -> None:
    """Raise ValueError or TypeError if a number of a group of parameters is out of range."""
    check_positive(eps=options["eps"], smallest=options["smallest"])
    for name in ("lr", "weight_decay"):
        check_number(name, options[name])
        if not options[name] >= 0:
            raise ValueError(f"{name}: expected a number of at least 0, got {options[name]}")
    beta1, beta2 = options["betas"]
    for name, number in (("momentum", options["momentum"]), ("betas[0]", beta1), ("betas[1]", beta2)):
        check_number(name, number)
        if not 0 <= number < 1:
            raise ValueError(f"{name}: expected a number in [0, 1), got {number}")


class Muon(torch.optim.Optimizer):
    r"""Muon for matrices and stacks of matrices; AdamW for all other parameters, with the same rate.

    The momentum of each matrix is made orthogonal before it is applied (Jordan et al. 2024), and scaled to the size of
    a step of AdamW (Liu et al. 2025, Eq. 4):

    .. math::
        m \leftarrow \mu m + (1 - \mu) g, \qquad
        W \leftarrow (1 - \eta \lambda) W - 0.2\, \eta \sqrt{\max(r, c)}\; U V^\top
        \quad\text{where}\quad (1 - \mu) g + \mu m = U \Sigma V^\top

    The singular value decomposition is replaced by five Newton-Schulz steps, which bring singular values to about 0.7
    to 1.2, and very small ones to less. ``torch.optim.Muon`` does this for matrices ``[r, c]`` only. Here the last two
    axes of a parameter are matrices, so that a kernel on a group ``[order, r, c]``, such as the weight of
    :class:`lieattn.nn.GroupLinear`, has one matrix for each group element.

    Parameters
    ----------
    params
        Parameters, or parameter groups as for every optimizer of torch.
    lr
        Learning rate η. A good one is two to four times the best rate of AdamW.
    weight_decay
        Weight decay λ of all parameters.
    momentum
        Momentum μ.
    betas, eps
        Coefficients of AdamW.
    smallest
        Matrices with fewer rows or columns than this are trained by AdamW.

    Examples
    --------
    >>> import torch
    >>> from lieattn.groups import tetrahedral
    >>> from lieattn.nn import GroupLinear
    >>> from lieattn.train import Muon
    >>> layer = GroupLinear(tetrahedral(), 16, 16)
    >>> optimizer = Muon(layer.parameters(), lr=0.01)
    >>> layer(torch.randn(5, 12, 16)).square().mean().backward()
    >>> optimizer.step()
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float = 0.01,
        weight_decay: float = 0.01,
        momentum: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        smallest: int = 8,
    ) -> None:
        check_arguments(Muon.__init__, locals())
        defaults = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "betas": tuple(betas), "eps": eps}
        defaults |= {"smallest": smallest}
        _check_options(defaults)
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of ``params`` with values of its own, such as ``lr``, which raise the errors of the class."""
        check_arguments(Muon.add_param_group, locals())
        check_arguments(Muon.__init__, {name: param_group[name] for name in self.defaults if name in param_group})
        _check_options({**self.defaults, **param_group})
        super().add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update all parameters that have gradients; ``closure`` recomputes the loss, which is then returned."""
        check_arguments(Muon.step, locals())
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            alike = defaultdict[Any, list[tuple[Tensor, Tensor]]](list)  # pairs of parameter and update, by shape
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                if weight.grad.is_sparse:
                    raise ValueError("params: expected dense gradients, got a sparse one")
                if weight.is_complex():
                    raise ValueError(f"params: expected real parameters, got one of {weight.dtype}")
                weight.mul_(1 - group["lr"] * group["weight_decay"])
                if weight.ndim < 2 or min(weight.shape[-2:]) < group["smallest"]:
                    self._adam(weight, group)
                    continue
                state = self.state[weight]
                if "momentum_buffer" not in state:
                    state["momentum_buffer"] = torch.zeros_like(weight)
                average = state["momentum_buffer"]
                average.lerp_(weight.grad, 1 - group["momentum"])
                update = weight.grad.lerp(average, group["momentum"]).reshape(-1, *weight.shape[-2:])
                alike[weight.dtype, weight.device, *weight.shape[-2:]].append((weight, update))
            for pairs in alike.values():
                self._orthogonal(pairs, group["lr"])
        return loss

    @staticmethod
    def _orthogonal(pairs: list[tuple[Tensor, Tensor]], lr: float) -> None:
        """Subtract the orthogonal matrices nearest to the updates ``[matrices, r, c]``, which share one r and c."""
        made = orthogonalized(torch.cat([update for _, update in pairs]))
        scale = _SIZE * max(made.shape[1:]) ** 0.5
        for (weight, _), part in zip(pairs, made.split([len(update) for _, update in pairs]), strict=True):
            weight.sub_(part.view_as(weight), alpha=lr * scale)

    def _adam(self, weight: Tensor, group: dict[str, Any]) -> None:
        grad, state = weight.grad, self.state[weight]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(weight), torch.zeros_like(weight)
        (beta1, beta2), mean, square = group["betas"], state["exp_avg"], state["exp_avg_sq"]
        state["step"] += 1
        mean.lerp_(grad, 1 - beta1)
        square.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        step = state["step"].item()
        root = (square / (1 - beta2**step)).sqrt_().add_(group["eps"])
        weight.addcdiv_(mean, root, value=-group["lr"] / (1 - beta1**step))


def orthogonalized(matrices: Float[Tensor, "n rows columns"]) -> Float[Tensor, "n rows columns"]:
    """Return matrices ``[n, r, c]`` with the same singular vectors, and with singular values of about 0.7 to 1.2."""
    wide = torch.float32 if matrices.dtype == torch.float16 else matrices.dtype  # norms exceed the range of float16
    x = matrices.to(wide)
    x = x / x.abs().amax(dim=(1, 2), keepdim=True).clamp(min=1)  # squares of large entries exceed the range of float32
    x = x / (x.flatten(1).norm(dim=1)[:, None, None] + 1e-12)
    tall = x.shape[1] > x.shape[2]
    x = x.mT if tall else x
    a, b, c = _COEFFICIENTS
    for _ in range(_STEPS):
        product = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(product, product, product, beta=b, alpha=c), x, beta=a)
    return (x.mT if tall else x).to(matrices.dtype)
