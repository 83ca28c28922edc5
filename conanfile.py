"""Conan 2 recipe: a header-only package. `conan create .` builds it from this checkout."""

import os
import re

from conan import ConanFile
from conan.tools.build import check_min_cppstd
from conan.tools.cmake import CMake, CMakeToolchain, cmake_layout
from conan.tools.files import load, rmdir

required_conan_version = ">=2.0"


class ChunkattnConan(ConanFile):
    name = "chunkattn"
    license = "MIT"
    description = "Prefix-aware KV cache and two-phase attention for LLM inference, header-only"
    topics = ("llm", "attention", "kv-cache", "inference", "cuda", "header-only")
    package_type = "header-library"
    settings = "os", "compiler", "build_type", "arch"  # of the test package; see package_id
    no_copy_source = True
    exports = "include/chunkattn/version.hpp"
    exports_sources = "CMakeLists.txt", "LICENSE", "cmake/*", "include/*", "!cmake/packaging/*"

    def set_version(self):
        header = load(self, os.path.join(self.recipe_folder, "include/chunkattn/version.hpp"))
        numbers = re.findall(r"#define CHUNKATTN_VERSION_(?:MAJOR|MINOR|PATCH) (\d+)", header)
        self.version = ".".join(numbers)

    def validate(self):
        if self.settings.get_safe("compiler.cppstd"):
            check_min_cppstd(self, 20)

    def layout(self):
        cmake_layout(self, src_folder=".")

    def generate(self):
        toolchain = CMakeToolchain(self)
        for option in ("TESTS", "EXAMPLES", "BENCH"):
            toolchain.cache_variables["CHUNKATTN_BUILD_" + option] = False
        toolchain.cache_variables["CHUNKATTN_CUDA"] = "OFF"
        toolchain.generate()

    def package(self):
        cmake = CMake(self)
        cmake.configure()
        cmake.install()
        # Conan writes its own package files, with the same target names, from package_info().
        rmdir(self, os.path.join(self.package_folder, "share", "pkgconfig"))
        for name in os.listdir(self._cmake_folder):
            if name != "chunkattn-cuda.cmake":
                os.remove(os.path.join(self._cmake_folder, name))

    @property
    def _cmake_folder(self):
        return os.path.join(self.package_folder, "share", "cmake", "chunkattn")

    def package_id(self):
        self.info.clear()

    def package_info(self):
        self.cpp_info.bindirs = []
        self.cpp_info.libdirs = []
        self.cpp_info.set_property("cmake_file_name", "chunkattn")
        self.cpp_info.set_property("cmake_target_name", "chunkattn::chunkattn")
        self.cpp_info.set_property("pkg_config_name", "chunkattn")
        # chunkattn_add_cuda_target(), which makes chunkattn::cuda where CUDAToolkit has been found.
        self.cpp_info.set_property(
            "cmake_build_modules", [os.path.join("share", "cmake", "chunkattn", "chunkattn-cuda.cmake")]
        )
        if self.settings.get_safe("os") in ("Linux", "FreeBSD"):
            self.cpp_info.system_libs = ["pthread"]
