"""Matrix products whose sums stay in float32, of bfloat16 numbers too; on a CPU by float32 products."""

import torch
from torch import Tensor


def logits_dtype(values: Tensor) -> torch.dtype:
    """The dtype that products of `values` are summed in: float32, or float64 for float64."""
    return torch.promote_types(values.dtype, torch.float32)


def product(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """left @ right, rounded once, to `dtype`."""
    out = left.new_empty(len(left), right.shape[1], dtype=dtype)
    product_into(left, right, out)
    return out


def product_into(left: Tensor, right: Tensor, out: Tensor) -> None:
    """out = left @ right, summed in float32 and rounded once, to the dtype of `out`."""
    if not left.is_cuda:
        out.copy_(left.to(logits_dtype(left)) @ right.to(logits_dtype(right)))
    elif out.dtype == left.dtype:
        torch.mm(left, right, out=out)
    else:
        torch.mm(left, right, out_dtype=out.dtype, out=out)


def add_product(left: Tensor, right: Tensor, total: Tensor) -> None:
    """total += left @ right, summed in float32."""
    if not left.is_cuda:
        total.add_(left.to(logits_dtype(left)) @ right.to(logits_dtype(right)))
    elif total.dtype == left.dtype:
        total.addmm_(left, right)
    else:
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)


def sum_of_products(parts: list[Tensor], right: Tensor) -> Tensor:
    """The sum of part @ right, rounded once, to their dtype."""
    if len(parts) == 1:
        return product(parts[0], right, right.dtype)
    total = product(parts[0], right, logits_dtype(right))
    for part in parts[1:]:
        add_product(part, right, total)
    return total.to(right.dtype)
