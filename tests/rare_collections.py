"""Run a module, a script or code with rare garbage collections, which take a third of the time of a short program.

    rare_collections.py (-m MODULE | -c CODE | SCRIPT) [arguments]

The commands of the package import their modules without collections themselves (`load_entry`). Launchers and small
programs of tests do not.
"""

import atexit
import gc
import os
import runpy
import sys


def run() -> None:
    kind, *rest = sys.argv[1:]
    if kind in ("-m", "-c"):
        sys.path[0] = os.getcwd()
        sys.argv[:] = ["-c", *rest[1:]]
        if kind == "-m":
            runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        else:
            exec(compile(rest[0], "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.path[0] = os.path.dirname(os.path.abspath(kind))
        sys.argv[:] = [kind, *rest]
        runpy.run_path(kind, run_name="__main__")


if __name__ == "__main__":
    gc.set_threshold(100_000, 50, 100)
    atexit.register(gc.freeze)  # the interpreter collects once more after the functions of atexit
    run()
