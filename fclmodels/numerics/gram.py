"""Products with symmetric and triangular matrices in blocks: about half of the arithmetic is never done."""

from torch import Tensor

from fclmodels.numerics.products import product

# Rows of a block: narrower ones leave out more, wider ones multiply faster.
BLOCK = 96


def gram_of(X: Tensor) -> Tensor:
    """X X^T [d, d] of X [d, n], in X's precision."""
    total = X.new_zeros(len(X), len(X))
    add_gram(total, X)
    mirror(total)
    return total


def add_gram(total: Tensor, X: Tensor) -> None:
    """total += X X^T on and above the diagonal: the products in X's precision, the sum in total's."""
    X = X.contiguous()
    for low, high in _blocks(len(total)):
        total[:high, low:high] += product(X[:high], X[low:high].T)


def mirror(total: Tensor) -> None:
    """Write what add_gram has summed above the diagonal below it too."""
    for low, high in _blocks(len(total)):
        total[low:high, :low] = total[:low, low:high].T


def lower_times_(F: Tensor, Z: Tensor) -> Tensor:
    """F Z for a lower triangular F [d, d], written over Z."""
    # From the last rows on, which those above them do not need.
    for low, high in reversed(_blocks(len(F))):
        Z[low:high] = product(F[low:high, :high], Z[:high])
    return Z


def _blocks(d: int) -> list[tuple[int, int]]:
    return [(low, min(low + BLOCK, d)) for low in range(0, d, BLOCK)]
