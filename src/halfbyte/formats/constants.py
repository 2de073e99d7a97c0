"""Tensors that a process makes once for each device, and keeps."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from functools import _lru_cache_wrapper

T = TypeVar("T")


def kept(make: Callable[..., T]) -> _lru_cache_wrapper[T]:
    """Call `make` once for each set of arguments, the last of which is a device, and keep what it gives.

    Another thread makes it. Those who route allocations to a pool of theirs do so for their own thread, and may lose
    what is in the pool: vLLM, which loads weights into one, empties it when it sleeps, and a graph's goes with the
    graph. Grad and inference modes are a thread's, too. The work is in the caller's stream.
    """

    @cache
    @wraps(make)
    def get(*key: Any) -> T:
        def there() -> T:
            if key[-1].type != "cuda":
                return make(*key)
            import torch

            with torch.cuda.device(stream.device), torch.cuda.stream(stream):
                return make(*key)

        from concurrent.futures import ThreadPoolExecutor  # which `halfbyte explain` can do without

        stream = _stream(key[-1])
        with ThreadPoolExecutor(1) as another:
            return another.submit(there).result()

    return get


def _stream(device: Any) -> Any:
    """The current one of a GPU; nothing of other devices."""
    if device.type != "cuda":
        return None
    import torch

    return torch.cuda.current_stream(device)
