"""Prepares every process of a host's job for a machine without a GPU, before the process imports the host.

Python imports this module at startup. `DRIVER` names the host: verl, slime, miles or nemo_rl.
"""

import importlib
import os
import sys


class _BeforeHost:
    """Calls `prepare` of the host's module `…_on_cpu` with the first import of the host."""

    def __init__(self, host: str):
        self._host = host

    def find_spec(self, name, path=None, target=None):
        if name == self._host:
            sys.meta_path.remove(self)
            importlib.import_module(f"{self._host}_on_cpu").prepare()
        return None


if "DRIVER" in os.environ:
    sys.meta_path.insert(0, _BeforeHost(os.environ["DRIVER"]))
