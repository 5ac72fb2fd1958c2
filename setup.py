"""Names the C core's builder and tells the truth in the wheel's name.

The rest is in pyproject.toml. The C core is optional; a wheel in which it could
not be built is tagged `py3-none-any`. With a platform's tag it would be taken for
the real one, cached, and hide a compiler that is installed later.
"""

import contextlib
import os
import sysconfig
from typing import Any

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel


class TruthfulWheel(bdist_wheel):
    def run(self) -> None:
        self._look_at_what_was_built()
        super().run()

    def get_tag(self) -> tuple[str, str, str]:
        self._look_at_what_was_built()
        return super().get_tag()

    def _look_at_what_was_built(self) -> None:
        if not self.distribution.ext_modules:
            return
        build_ext: Any = self.get_finalized_command("build_ext")
        wanted = [build_ext.get_ext_fullpath(e.name) for e in build_ext.extensions]
        if not self.distribution.have_run.get("build_ext"):
            _forget(wanted)
            self.run_command("build_ext")
        if not all(map(os.path.exists, wanted)):
            self.distribution.ext_modules = []
            self.root_is_pure = True
            self.py_limited_api = False


def _forget(built: list[str]) -> None:
    """What an earlier build left would pass for today's if today's fails."""
    for path in built:
        with contextlib.suppress(FileNotFoundError):
            os.remove(path)


free_threaded = bool(sysconfig.get_config_var("Py_GIL_DISABLED"))
stable_abi = {"py_limited_api": "cp311"} if not free_threaded else {}

setup(
    cffi_modules=["csrc/build.py:ffi"],
    cmdclass={"bdist_wheel": TruthfulWheel},
    options={"bdist_wheel": stable_abi},
)
