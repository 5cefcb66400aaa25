"""Flame's object cache as FDG uses it: its own client, with a deadline on every call and errors that say what they mean."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from fdg.errors import RunError

CALL_SECONDS = 60.0
"""Seconds that the cache may take for one call: a large object takes some, a server that was stopped takes for ever."""
DELETE_SECONDS = 5.0
"""Seconds that it may take to delete something."""

RESUME = "Where there is a checkpoint, --resume goes on from it"


class CacheLost(RunError):
    """The object cache does not answer, or has lost an object."""


class Limited:
    """Flame's connection to its cache, with a deadline on every call; it has none by itself."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def do_put(self, descriptor: Any, schema: Any, options: Any = None) -> Any:
        return self._client.do_put(descriptor, schema, options or limit(CALL_SECONDS))

    def do_get(self, ticket: Any) -> Any:
        return self._client.do_get(ticket, limit(CALL_SECONDS))

    def do_action(self, action: Any) -> Any:
        return self._client.do_action(action, limit(DELETE_SECONDS))

    def get_flight_info(self, descriptor: Any) -> Any:
        return self._client.get_flight_info(descriptor, limit(CALL_SECONDS))


def limit(seconds: float) -> Any:
    from pyarrow.flight import FlightCallOptions

    return FlightCallOptions(timeout=seconds)


def objects() -> Any:
    """Flame's client of the object cache: put_object, get_object, patch_object, update_object, delete_objects."""
    from flamepy.core import cache

    if getattr(cache, "fdg_connect", None) is None:
        cache.GRPC_OPTIONS.append(("grpc.max_reconnect_backoff_ms", 1000))  # a cache that is back is soon found
        cache.fdg_connect = connect = cache._create_flight_client
        cache._create_flight_client = lambda *where: Limited(connect(*where))
        cache._client_pool.clear()
    return cache


def elsewhere() -> None:
    """Another cluster may be meant from now on."""
    objects()._context_cache = None


@contextlib.contextmanager
def cache_errors(doing: str) -> Iterator[None]:
    """Say of a failure in the object cache what it means."""
    try:
        yield
    except KeyError as error:
        raise CacheLost(
            f"Flame's object cache has lost an object ({doing}: {first_line(error)}). Was it started anew without storage, "
            f"or is its max_memory too small for what a run keeps in it? {RESUME}"
        ) from None
    except Exception as error:
        raise CacheLost(
            f"Flame's object cache does not answer ({doing}: {first_line(error)}). Start flame-object-cache again, or a new "
            f"cluster (fdg flame down, fdg flame up). {RESUME}"
        ) from None


def first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0][:200]


def forget(key: str) -> None:
    """Drop an object from the client's own cache, which would keep a thousand of them, whatever their size."""
    with contextlib.suppress(Exception):
        cache = objects()
        for known in [known for known in cache._object_cache if known[1] == key]:
            cache._object_cache.pop(known, None)


def delete(what: str) -> bool:
    """Delete an object, or all under a prefix; whether the cache has answered. Gone is gone."""
    with contextlib.suppress(Exception):
        objects().delete_objects(what)
        return True
    return False
