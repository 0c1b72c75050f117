"""Work on threads that leaves the main one free to heed Ctrl-C.

Python sees a signal only between two of its own steps, and a solve of a large matrix is one step of many seconds. On
a thread of its own it goes on unheeded while the main thread, which only waits, is interrupted at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
U = TypeVar("U")


def in_threads(work: Callable[[T], U], items: Sequence[T], count: int) -> list[U]:
    """The results of ``work`` on every item, ``count`` at once, in the items' order.

    Interrupted, it returns at once; what the threads are computing then is thrown away when it is done.

    Examples:
        >>> in_threads(lambda x: x * x, [1, 2, 3], 2)
        [1, 4, 9]
    """
    if not items:
        return []
    pool = ThreadPoolExecutor(max(1, min(count, len(items))))
    try:
        found = list(pool.map(work, items))
    except KeyboardInterrupt:
        pool.shutdown(wait=False, cancel_futures=True)
        raise
    except BaseException:
        pool.shutdown(wait=True, cancel_futures=True)
        raise
    pool.shutdown()
    return found


def interruptible(work: Callable[[], U]) -> U:
    """The result of ``work``, computed on a thread.

    Examples:
        >>> interruptible(lambda: 2 + 2)
        4
    """
    return in_threads(lambda body: body(), [work], 1)[0]
