"""A Python that has imported torch and Megatron already: it forks for every process that a launch starts.

`python()` is an executable for launches. It takes `-m module …`, `-c code …` or `script.py …` as an interpreter does.
A server, which the first call starts, forks a process with the caller's arguments, environment, folder and files; the
executable waits for it, passes signals on and ends as it does. PYTHONPATH may have further folders at its end. In an
environment that imports anything else it is the plain interpreter.
"""

import argparse
import array
import atexit
import contextlib
import functools
import importlib
import json
import os
import runpy
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

# What an interpreter reads when it starts, or a module when it is imported.
READ_AT_IMPORT = ("PYTHONPATH", "PYTHONWARNINGS", "PYTHONHASHSEED", "TRITON_INTERPRET", "OMP_NUM_THREADS")
# What most launches import; the example itself is run again, with all that it imports.
IMPORTED = ("torch.distributed.run", "matplotlib.pyplot", "train_grpo")
PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
LENGTH = 8  # bytes that give the length of a message

_started: dict[str, str] = {}  # the executable, by what its server has imported
_servers: list[subprocess.Popen] = []
_lock = threading.Lock()


def python(environment: Mapping[str, str]) -> str:
    """The path of the executable for launches with this environment."""
    key = json.dumps(_read_at_import(environment))
    with _lock:
        if key not in _started:
            _started[key] = _start(environment)
        return _started[key]


def _start(environment: Mapping[str, str]) -> str:
    folder = Path(tempfile.mkdtemp(prefix="warm"))
    (folder / "imported.json").write_text(json.dumps(_read_at_import(environment)), encoding="utf-8")
    executable = folder / "python"
    here = Path(__file__).resolve()
    executable.write_text(f"#!/bin/sh\nexec '{sys.executable}' -I -S '{here}' '{folder}' '{sys.executable}' \"$@\"\n")
    executable.chmod(0o755)
    command = [sys.executable, str(here), str(folder)]
    server = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    _servers.append(server)
    if not server.stdout.readline():
        raise RuntimeError("the server of warm interpreters did not start")
    return str(executable)


@atexit.register
def _end_servers() -> None:
    """A server ends with its standard input, and so with this process however that ends."""
    for server in _servers:
        server.stdin.close()
        server.stdout.close()
        server.wait()


def _read_at_import(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: environment.get(name, "") for name in READ_AT_IMPORT}


def _send(connection: socket.socket, message: object) -> None:
    content = json.dumps(message).encode()
    connection.sendall(len(content).to_bytes(LENGTH, "big") + content)


def _receive(connection: socket.socket) -> object:
    """A message; None at the end of the connection."""
    head = _exactly(connection, LENGTH)
    return None if head is None else json.loads(_exactly(connection, int.from_bytes(head, "big")) or b"null")


def _exactly(connection: socket.socket, length: int) -> bytes | None:
    found = b""
    while len(found) < length:
        part = connection.recv(length - len(found))
        if not part:
            return None
        found += part
    return found


# ---- The executable ----


def call(folder: Path, interpreter: str, words: list[str]) -> NoReturn:
    """Wait for a process of the server's that runs the words, and end as it does."""
    options = [word for word in words[:1] if word == "-u"]
    rest = words[len(options) :]
    is_known = bool(rest) and (rest[0] in ("-m", "-c") or not rest[0].startswith("-"))
    imported = json.loads((folder / "imported.json").read_text(encoding="utf-8"))
    now = _read_at_import(os.environ)
    if now["PYTHONPATH"].startswith(imported["PYTHONPATH"]):
        imported["PYTHONPATH"] = now["PYTHONPATH"]
    if not is_known or imported != now:
        os.execv(interpreter, [interpreter, *words])
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.connect(str(folder / "socket"))
    files = array.array("i", [0, 1, 2])
    connection.sendmsg([b"\0"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, files)])
    _send(connection, {"words": rest, "is_unbuffered": bool(options), "folder": os.getcwd(), "env": dict(os.environ)})
    pid = _receive(connection)
    for number in PASSED_ON:
        signal.signal(number, lambda number, _: os.kill(pid, number))
    status = _receive(connection)
    if status is None:  # the server is gone
        os.kill(pid, signal.SIGKILL)
        os._exit(1)
    if status < 0:
        signal.signal(-status, signal.SIG_DFL) if -status != signal.SIGKILL else None
        os.kill(os.getpid(), -status)
    os._exit(status)


# ---- The server ----


def serve(folder: Path) -> dict:
    """Fork for every call; returns in the forked process, with what it is to run."""
    selector = selectors.DefaultSelector()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(folder / "socket"))
    listener.listen(64)
    selector.register(listener, selectors.EVENT_READ)
    selector.register(0, selectors.EVENT_READ)
    callers: dict[int, tuple[int, socket.socket]] = {}  # process and connection, by the process's descriptor
    print("ready", flush=True)
    while True:
        for key, _ in selector.select():
            if key.fileobj == 0:
                shutil.rmtree(folder, ignore_errors=True)
                os._exit(0)
            elif key.fileobj is listener:
                connection, _ = listener.accept()
                files, request = _request(connection)
                pid = os.fork()
                if pid == 0:
                    selector.close()
                    for own in (listener, connection, *(other for _, other in callers.values())):
                        own.close()
                    for descriptor in callers:
                        os.close(descriptor)
                    return request | {"files": files}
                for file in files:
                    os.close(file)
                _send(connection, pid)
                descriptor = os.pidfd_open(pid)
                callers[descriptor] = pid, connection
                selector.register(descriptor, selectors.EVENT_READ)
                selector.register(connection, selectors.EVENT_READ, pid)
            elif key.data is not None:  # the caller was killed
                selector.unregister(key.fileobj)
                os.kill(key.data, signal.SIGKILL)
            elif key.fileobj in callers:
                _end(selector, *callers.pop(key.fileobj), key.fileobj)


def _request(connection: socket.socket) -> tuple[list[int], dict]:
    files = array.array("i")
    _, ancillary, *_ = connection.recvmsg(1, socket.CMSG_SPACE(3 * files.itemsize))
    files.frombytes(ancillary[0][2])
    return list(files), _receive(connection)


def _end(selector: selectors.BaseSelector, pid: int, connection: socket.socket, descriptor: int) -> None:
    """Say how a process has ended."""
    _, status = os.waitpid(pid, 0)
    selector.unregister(descriptor)
    os.close(descriptor)
    if connection in {key.fileobj for key in selector.get_map().values()}:
        selector.unregister(connection)
        with contextlib.suppress(OSError):  # the caller was killed meanwhile
            _send(connection, os.waitstatus_to_exitcode(status))
    connection.close()


def become(request: dict, set_at_import: dict[str, str]) -> None:
    """Run what was asked for, as a new interpreter would; imports have set some variables of the environment."""
    import numpy as np

    os.setsid()
    for place, file in enumerate(request["files"]):
        os.dup2(file, place)
        os.close(file)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(set_at_import | request["env"])
    np.random.seed()  # Python's own generator is seeded at a fork
    folders = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path += [folder for folder in folders if folder and folder not in sys.path]
    words = request["words"]
    if request["is_unbuffered"]:
        sys.stdout.reconfigure(write_through=True)
    if words[0] == "-m":
        sys.path[0], sys.argv = os.getcwd(), words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    elif words[0] == "-c":
        sys.path[0], sys.argv = "", ["-c", *words[2:]]
        exec(compile(words[1], "<string>", "exec"), vars(sys.modules["__main__"]))
    else:
        sys.path[0], sys.argv = str(Path(words[0]).resolve().parent), words
        runpy.run_path(os.path.abspath(words[0]), run_name="__main__")  # `__file__` is absolute, as Python has it


def run_to_its_end(request: dict, set_at_import: dict[str, str]) -> None:
    """Run what was asked for, and end as an interpreter does, but leave the modules to the kernel: taking them apart
    costs more than a start does. An error ends in the usual way."""
    status = 0
    try:
        become(request, set_at_import)
    except SystemExit as end:
        if not isinstance(end.code, int | None):
            raise
        status = end.code or 0
    threading._shutdown()  # waits for threads
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _import() -> dict[str, str]:
    """Import what launched processes import; the variables of the environment that this sets."""
    import gc
    import warnings

    import interpreter
    from cpu import cpu_megatron

    before = dict(os.environ)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cpu_megatron.enable()
        for name in IMPORTED:
            importlib.import_module(name)
        _read_arguments_once()
        interpreter.make_faster()
    gc.collect()
    gc.freeze()
    return {name: value for name, value in os.environ.items() if before.get(name) != value}


def _read_arguments_once() -> None:
    """Megatron reads and parses its own source for the help texts of its arguments, twice in every rank."""
    from megatron.training import argument_utils, arguments

    factory = argument_utils.ArgumentGroupFactory
    read = functools.partial(factory._get_field_docstrings, object.__new__(factory))
    known = functools.cache(read)
    factory._get_field_docstrings = lambda self, source: known(source)
    arguments.add_megatron_arguments(argparse.ArgumentParser())


if __name__ == "__main__":
    if len(sys.argv) > 2:
        call(Path(sys.argv[1]), sys.argv[2], sys.argv[3:])
    set_at_import = _import()
    run_to_its_end(serve(Path(sys.argv[1])), set_at_import)
