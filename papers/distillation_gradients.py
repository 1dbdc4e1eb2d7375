"""Which forms of on-policy distillation have the teacher in their gradient.

    python papers/distillation_gradients.py

With a vocabulary of four tokens every expectation is a sum: the expected gradient of a form, over tokens that an older
policy sampled, is compared with the gradients of KL(policy || teacher), of KL(teacher || policy), and with 0. Sources:
On-Policy Distillation of Language Models (arXiv 2306.13649); A Comedy of Estimators (arXiv 2512.21852).
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import show
import torch
from torch import Tensor

POLICY = (1.0, 0.0, -1.0, 0.5)  # logits
TEACHER = (0.0, 0.5, 0.0, -0.5)
SAMPLER = (0.6, 0.2, -0.6, 0.4)  # an older policy that the tokens come from

# Of log policy, log older policy and log teacher of the sampled token; sg is `detach`.
FORMS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "k1_weighted: r·x": lambda new, old, teacher: (new - old).exp() * (new - teacher),
    "k3_weighted: r·(e^-x - 1 + x)": lambda new, old, teacher: (
        (new - old).exp() * (torch.expm1(teacher - new) + new - teacher)
    ),
    "k2: x²/2": lambda new, old, teacher: (new - teacher).square() / 2,
    "k1: x, backpropagated": lambda new, old, teacher: new - teacher,
    "k3: e^-x - 1 + x": lambda new, old, teacher: torch.expm1(teacher - new) + new - teacher,
    "advantage of the sampler: r·sg[log π_old - log π_T]": lambda new, old, teacher: (
        (new - old).exp() * (old - teacher)
    ),
    "advantage of the policy: r·sg[x]": lambda new, old, teacher: (new - old).exp() * (new - teacher).detach(),
    "one advantage for every token: r·sg[KL]": lambda new, old, teacher: (
        (new - old).exp() * divergence(new, teacher).detach()
    ),
}


@dataclass(frozen=True, slots=True)
class Row:
    """Distance of a form's expected gradient from what it should be, over the size of that."""

    form: str
    on_policy: float
    off_policy: float
    teacher: (
        float  # by how much the expected off-policy gradient changes with the teacher, over the size of the true one
    )


def divergence(p: Tensor, q: Tensor) -> Tensor:
    """KL(p || q) of two vectors of log-probabilities."""
    return (p.exp() * (p - q)).sum()


def expected_gradient(form: str, sampler: tuple[float, ...], teacher: tuple[float, ...] = TEACHER) -> Tensor:
    """Gradient by the policy's logits, averaged over the sampler's tokens."""
    z = torch.tensor(POLICY, dtype=torch.float64, requires_grad=True)
    new = z.log_softmax(dim=0)
    old, other = (torch.tensor(values, dtype=torch.float64).log_softmax(dim=0) for values in (sampler, teacher))
    (gradient,) = torch.autograd.grad((old.exp() * FORMS[form](new, old, other)).sum(), z)
    return gradient


def true_gradient(teacher: tuple[float, ...] = TEACHER) -> Tensor:
    """dKL(policy || teacher) / dz_j = p_j (x_j - KL), with x the log-ratio of policy and teacher."""
    new, other = (torch.tensor(values, dtype=torch.float64).log_softmax(dim=0) for values in (POLICY, teacher))
    return new.exp() * (new - other - divergence(new, other))


def measure() -> list[Row]:
    """Every form, by enumeration."""
    truth = true_gradient()
    rows = []
    for form in FORMS:
        on, off = expected_gradient(form, POLICY), expected_gradient(form, SAMPLER)
        moved = expected_gradient(form, SAMPLER, SAMPLER[::-1]) - off
        expected = true_gradient(SAMPLER[::-1]) - truth
        distances = (float((g - t).norm() / t.norm()) for g, t in ((on, truth), (off, truth)))
        rows.append(Row(form, *distances, float(moved.norm() / expected.norm())))
    return rows


def cells(rows: list[Row]) -> list[tuple[str, ...]]:
    """The rows as texts."""
    return [(row.form, *(f"{value:.3f}" for value in (row.on_policy, row.off_policy, row.teacher))) for row in rows]


HEADER = ("form of the loss", "error on-policy", "error off-policy", "effect of the teacher")


def draw(rows: list[Row], folder: Path) -> None:
    """The errors of the forms, on tokens of the policy and of an older one."""
    figure, (ax,) = show.panels(1)
    figure.set_size_inches(8.4, 3.6)
    places = np.arange(len(rows))
    ax.barh(places + 0.19, [row.on_policy for row in rows], 0.36, color="#2471a3", label="on-policy")
    ax.barh(places - 0.19, [row.off_policy for row in rows], 0.36, color="#a9cce3", label="off-policy (older policy)")
    ax.set_yticks(places, [row.form for row in rows], fontsize=8)
    ax.invert_yaxis()
    ax.set(xlabel="error |E[gradient] − ∇KL(π‖π_T)| / |∇KL(π‖π_T)|; no bar: 0")
    ax.legend(frameon=False, fontsize=8)
    show.save(figure, folder, "distillation_gradients.png")


def main(folder: Path = show.PICTURES) -> None:
    """Print the table and draw."""
    title = (
        "|E[gradient] - ∇KL(π‖π_T)| / |∇KL(π‖π_T)|, by enumeration; effect: 0, no teacher in the gradient; 1, as it "
        "should be"
    )
    rows = measure()
    show.table(title, HEADER, cells(rows))
    draw(rows, folder)


if __name__ == "__main__":
    main()
