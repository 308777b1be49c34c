"""A watch on store calls: of the step's thread, and of other threads that hold locks."""

import contextlib
import sys
import threading
from collections import Counter

OF_STORES = ("mamba_cache.stores", "mooncake", "socket", "_socket", "ssl", "_ssl", "select")


class Lock:
    """A lock that counts by thread how often it is held, acquired and found taken."""

    def __init__(self, watch, lock):
        self._watch, self._lock = watch, lock
        for name in ("_is_owned", "_recursion_count"):
            if hasattr(lock, name):
                setattr(self, name, getattr(lock, name))
        if hasattr(lock, "_release_save"):
            self._release_save, self._acquire_restore = self._save, self._restore

    def acquire(self, blocking=True, *patience):
        taken = self._lock.acquire(blocking=False)
        if not taken and blocking:
            self._watch.found_taken[threading.get_ident()] += 1
            taken = self._lock.acquire(True, *patience)
        if taken:
            self._watch.acquired[threading.get_ident()] += 1
            self._watch.held[threading.get_ident()] += 1
        return taken

    def release(self):
        self._watch.held[threading.get_ident()] -= 1
        self._lock.release()

    def locked(self):
        return self._lock.locked()

    def __enter__(self):
        return self.acquire()

    def __exit__(self, *error):
        self.release()

    def _save(self):
        count = self._lock._recursion_count() if hasattr(self._lock, "_recursion_count") else 1
        self._watch.held[threading.get_ident()] -= count
        return self._lock._release_save(), count

    def _restore(self, saved):
        self._lock._acquire_restore(saved[0])
        self._watch.held[threading.get_ident()] += saved[1]


class Store:
    """A store that counts its calls, and those with a lock held."""

    def __init__(self, watch, store):
        self._watch, self._store = watch, store
        self.name = store.name

    def __getattr__(self, name):
        return self._watch.called(name, getattr(self._store, name))


class StepWatch:
    """Create the users of the store in ``locks()``, and run steps in ``steps()``."""

    def __init__(self):
        self.held, self.acquired, self.found_taken = Counter(), Counter(), Counter()
        self.calls, self.with_locks, self.entered = Counter(), Counter(), Counter()

    @contextlib.contextmanager
    def locks(self, monkeypatch):
        with monkeypatch.context() as patch:
            for name in ("Lock", "RLock"):
                make = getattr(threading, name)
                patch.setattr(threading, name, lambda make=make: Lock(self, make()))
            yield

    def store(self, store):
        return Store(self, store)

    def called(self, name, function):
        """A function that counts its calls, and its calls by threads that hold a lock."""

        def call(*args, **kwargs):
            self.calls[name] += 1
            self.with_locks[name] += self.held[threading.get_ident()] > 0
            return function(*args, **kwargs)

        return call

    @contextlib.contextmanager
    def steps(self):
        sys.setprofile(self._profile)
        try:
            yield
        finally:
            sys.setprofile(None)

    def _profile(self, frame, event, argument):
        name = frame.f_code.co_qualname
        module = frame.f_globals.get("__name__", "")
        if event == "c_call":
            name = argument.__name__
            owner = getattr(argument, "__self__", None)
            module = getattr(argument, "__module__", None) or type(owner).__module__
        elif event != "call":
            return
        elif frame.f_code is Store.__getattr__.__code__:
            name, module = frame.f_locals["name"], "mamba_cache.stores"
        if module.startswith(OF_STORES):
            self.entered[f"{module}.{name}"] += 1
