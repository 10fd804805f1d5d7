"""The build backend of pyproject.toml: setuptools', in an environment that has torch.

Pip and build ask for one of these hooks before they do anything else. Without torch
the answer is the reason and the remedy: SystemExit, as pip prints all of a traceback.
"""

import importlib.util
import sys

SETUPTOOLS = 77  # the first to read `license = "Apache-2.0"`

NO_TORCH = f"""\
error: zshard must be compiled against the torch it will run with, and this build sees no torch.
By default, pip and build hide installed packages from a build. Pass the flag that shows them:
    pip install --no-build-isolation .         # in a clone; elsewhere, `zshard` in place of the dot
    python -m build --no-isolation
If torch is not installed yet, install it first: pip install torch
(This build ran {sys.executable}.)"""

NO_SETUPTOOLS = f"""\
error: building zshard needs setuptools {SETUPTOOLS} or newer, {{found}}
({sys.executable}).
Install it, then repeat the command:
    pip install 'setuptools>={SETUPTOOLS}'"""


def check_torch():
    """Exit with the remedy unless torch can be imported here."""
    if importlib.util.find_spec("torch") is None:
        sys.exit(NO_TORCH)


def get_requires_for_build_wheel(config_settings=None):
    """Return what to install first: an isolated build that sees a torch still lacks setuptools."""
    check_torch()
    return [f"setuptools>={SETUPTOOLS}"]


get_requires_for_build_sdist = get_requires_for_build_wheel
get_requires_for_build_editable = get_requires_for_build_wheel


def __getattr__(name):
    """Return setuptools' hook of that name."""
    if name.startswith("__"):
        raise AttributeError(name)
    check_torch()
    try:
        import setuptools
    except ImportError:
        sys.exit(NO_SETUPTOOLS.format(found="and there is none"))
    if int(setuptools.__version__.split(".")[0]) < SETUPTOOLS:
        sys.exit(NO_SETUPTOOLS.format(found=f"and this is {setuptools.__version__}"))
    from setuptools import build_meta

    return getattr(build_meta, name)
