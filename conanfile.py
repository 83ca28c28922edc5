"""The package of this checkout: `conan create .`; a release's recipe is in cmake/packaging/conan."""

import importlib.util
import os
import re

from conan.tools.files import load

_release_path = os.path.join("cmake", "packaging", "conan", "chunkattn", "all")
_spec = importlib.util.spec_from_file_location(
    "chunkattn_release", os.path.join(os.path.dirname(__file__), _release_path, "conanfile.py"))
_release = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_release)


class ChunkattnCheckoutConan(_release.ChunkattnConan):
    url = _release.ChunkattnConan.homepage
    exports = os.path.join(_release_path, "conanfile.py"), "include/chunkattn/version.hpp"
    exports_sources = "LICENSE", "cmake/chunkattn-*.cmake", "include/*"
    test_package_folder = os.path.join(_release_path, "test_package")

    def set_version(self):
        header = load(self, os.path.join(self.recipe_folder, "include/chunkattn/version.hpp"))
        numbers = re.findall(r"#define CHUNKATTN_VERSION_(?:MAJOR|MINOR|PATCH) (\d+)", header)
        self.version = ".".join(numbers)

    def layout(self):  # the sources are exported, at the root
        pass

    def source(self):
        pass
