"""The Python packages of one check: those that ./dev has installed for it, where this Python lacks them."""
import importlib
import os
import sys

BUILD = os.path.join(os.path.dirname(os.path.abspath(__file__)), "../../../build")


def need(name, installed_by, *packages):
    """Continues with build/NAME-python where a package is missing; where that is not there, skips the check."""
    try:
        for package in packages:
            importlib.import_module(package)
    except ImportError as error:
        python = os.path.join(BUILD, f"{name}-python/bin/python")
        if os.path.exists(python) and os.path.abspath(sys.executable) != os.path.abspath(python):
            os.execv(python, [python, *sys.argv])
        print(f"SKIPPED: {error}; {installed_by} installs it")
        sys.exit(77)
