"""Builds `effectfence._core` with cffi, in API mode.

The declarations are the header's own, so the compiler and cffi can't disagree.
Switches, for whoever works on the C code (each needs a rebuild):

* ``EFFECTFENCE_SANITIZE=address,undefined`` or ``=thread``: what `-fsanitize` takes
* ``EFFECTFENCE_COVERAGE=1``: line counts for gcov
* ``EFFECTFENCE_DEBUG=1``: no optimisation, assertions on
* ``EFFECTFENCE_WERROR=1``: a warning is an error

Without a compiler the extension is left out (`optional`) and the library runs on
its stand-in in pure Python.
"""

import os
import sys
import sysconfig
from pathlib import Path

from cffi import FFI

HERE = Path(__file__).parent
SOURCES = ("counter.c", "sha256.c")
WARNINGS = ["-std=c11", "-Wall", "-Wextra"]


def declarations() -> str:
    header = (HERE / "effectfence.h").read_text(encoding="utf-8")
    _, _, rest = header.partition("/* cffi: begin */")
    shared, mark, _ = rest.partition("/* cffi: end */")
    assert mark, "effectfence.h has lost its marks"
    return shared


def flags() -> tuple[list[str], list[str]]:
    """What to compile and what to link with."""
    if sys.platform == "win32":
        return [], []
    compile_flags, link_flags = [*WARNINGS, "-O2", "-fvisibility=hidden"], []
    if sanitizers := os.environ.get("EFFECTFENCE_SANITIZE"):
        chosen = [f"-fsanitize={sanitizers}", "-fno-omit-frame-pointer"]
        compile_flags += [*chosen, "-fno-sanitize-recover=all", "-g"]
        link_flags += chosen
    if os.environ.get("EFFECTFENCE_COVERAGE"):
        compile_flags += ["--coverage", "-O0", "-g"]
        link_flags += ["--coverage"]
    if os.environ.get("EFFECTFENCE_DEBUG"):
        compile_flags += ["-O0", "-g3", "-UNDEBUG"]
    if os.environ.get("EFFECTFENCE_WERROR"):
        compile_flags += ["-Werror"]
    return compile_flags, link_flags


def one_wheel_serves_all() -> bool:
    """Whether this Python takes a wheel of the stable ABI: free-threaded ones do from 3.15."""
    free_threaded = bool(sysconfig.get_config_var("Py_GIL_DISABLED"))
    return not free_threaded or sys.version_info >= (3, 15)


compile_flags, link_flags = flags()
ffi = FFI()
ffi.cdef(declarations())
ffi.set_source(
    "effectfence._core",
    '#include "effectfence.h"',
    sources=[os.path.relpath(HERE / source) for source in SOURCES],
    depends=[os.path.relpath(HERE / "effectfence.h")],
    include_dirs=[os.path.relpath(HERE)],
    extra_compile_args=compile_flags,
    extra_link_args=link_flags,
    py_limited_api=one_wheel_serves_all(),
    optional=True,
)
