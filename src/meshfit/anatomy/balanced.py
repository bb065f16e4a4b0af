"""A row of costs split into consecutive stages of which the largest is as small as can be, cheaply: exact, O(stages x
places). Numbers in, places out: ``cuts`` says what they stand for."""

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Sequence


def cheapest_ends(at: Sequence[float], price: Sequence[int], k: int, band: float) -> list[int]:
    """Ends of ``k`` stages over places with running costs ``at`` and a ``price`` to cut at each."""
    best = _smallest_largest(at, k)
    low, high = best * (1 + 1e-12), best * (1 + band) + 1e-12
    least, ends = _under(at, price, k, high)
    limit = low
    for _ in range(10):  # as even as can be for that price
        cost, found = _under(at, price, k, limit)
        if cost == least:
            high, ends = limit, found
        else:
            low = limit
        if high <= low:
            break
        limit = (low + high) / 2
    return ends


def _smallest_largest(at: Sequence[float], k: int) -> float:
    """The smallest possible cost of the largest of ``k`` stages.

    best[i] is that of the first i places in j stages. Both what it grows with (best) and what it falls with (the last
    stage) are monotone in the last cut, so the best last cut only moves forward: O(k x places).
    """
    places = len(at)
    best = [cost - at[0] for cost in at]
    for j in range(2, k + 1):
        row, cut = [float("inf")] * places, j - 1
        for i in range(j, places):
            cut = max(cut, j - 1)
            while cut + 1 < i and max(best[cut + 1], at[i] - at[cut + 1]) <= max(best[cut], at[i] - at[cut]):
                cut += 1
            row[i] = max(best[cut], at[i] - at[cut])
        best = row
    return best[-1]


def _under(at: Sequence[float], price: Sequence[int], k: int, limit: float) -> tuple[float, list[int]]:
    """(price, ends) of the cheapest ``k`` stages that cost at most ``limit`` each; (inf, []) if there are none."""
    last = len(at) - 1
    earliest, latest = [0] * (k + 1), [0] * (k + 1)  # where each stage can end
    earliest[k] = latest[k] = last
    for j in range(1, k):
        latest[j] = min(bisect_right(at, at[latest[j - 1]] + limit) - 1, last - (k - j))
    for j in range(k - 1, 0, -1):
        earliest[j] = max(bisect_left(at, at[earliest[j + 1]] - limit), j)
    rows: list[dict[int, tuple[float, int]]] = [{0: (0, 0)}]  # by end: the price so far, and where the stage begins
    for j in range(1, k + 1):
        before, row = rows[-1], {}
        window: deque[int] = deque()  # ends of the stage before, prices rising
        coming = iter(sorted(before))
        following = next(coming, None)
        for end in range(earliest[j], latest[j] + 1):
            while following is not None and following < end:
                while window and before[window[-1]][0] >= before[following][0]:
                    window.pop()
                window.append(following)
                following = next(coming, None)
            while window and at[end] - at[window[0]] > limit:
                window.popleft()
            if window:
                row[end] = (before[window[0]][0] + price[end], window[0])
        rows.append(row)
    if last not in rows[k]:
        return float("inf"), []
    ends = [last]
    for j in range(k, 1, -1):
        ends.append(rows[j][ends[-1]][1])
    return rows[k][last][0], ends[::-1]
