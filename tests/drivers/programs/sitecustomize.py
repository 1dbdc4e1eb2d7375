"""Prepares every process of a host's job for a machine without a GPU, before the process imports the host.

Python imports this module at startup. `DRIVER` names the host: verl, slime, miles or nemo_rl.
"""

import importlib
import importlib.util
import os
import sys


class _BeforeHost:
    """Calls `prepare` of the host's module `…_on_cpu` with the first import of the host, or of its engine."""

    def __init__(self, host: str):
        self._host = host

    def find_spec(self, name, path=None, target=None):
        if name not in (self._host, "sglang"):
            return None
        sys.meta_path.remove(self)
        importlib.import_module(f"{self._host}_on_cpu").prepare()
        return importlib.util.find_spec(name)  # `prepare` has changed the list of finders


if "DRIVER" in os.environ:
    sys.meta_path.insert(0, _BeforeHost(os.environ["DRIVER"]))
