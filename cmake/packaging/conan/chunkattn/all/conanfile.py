"""Packages a release of chunkattn: a header-only library, so nothing is compiled here."""

import os

from conan import ConanFile
from conan.errors import ConanInvalidConfiguration
from conan.tools.files import copy, get, save
from conan.tools.layout import basic_layout
from conan.tools.scm import Version

required_conan_version = ">=2.0"


class ChunkattnConan(ConanFile):
    name = "chunkattn"
    description = "Prefix-aware KV cache and two-phase attention for LLM inference, header-only"
    license = "MIT"
    url = "https://github.com/conan-io/conan-center-index"
    homepage = "https://github.com/chunkattn/chunkattn"
    topics = ("llm", "attention", "kv-cache", "inference", "cuda", "header-only")
    package_type = "header-library"
    settings = "os", "arch", "compiler", "build_type"
    no_copy_source = True

    @property
    def _oldest_compilers(self):
        return {"gcc": "12", "clang": "14"}

    def layout(self):
        basic_layout(self, src_folder="src")

    def package_id(self):
        self.info.clear()

    # No word about compiler.cppstd: what is compiled is the consumer, and the target below gives it
    # C++20 whatever the profile says. A compiler that cannot compile the headers is refused.
    def validate(self):
        systems = "Linux", "Windows"
        archs = ("x86_64",) if self.settings.get_safe("os") == "Windows" else ("x86_64", "armv8")
        for setting, supported in (("os", systems), ("arch", archs)):
            value = self.settings.get_safe(setting)
            if value and value not in supported:
                raise ConanInvalidConfiguration(
                    f"chunkattn is for Linux on x86_64 and armv8 and for Windows on x86_64: {setting}={value} is not supported")
        compiler = self.settings.get_safe("compiler")
        version = self.settings.get_safe("compiler.version")
        if not compiler or not version:
            return
        oldest = self._oldest_compilers.get(compiler)
        if not oldest or Version(version) < oldest:
            wanted = " or ".join(f"{name} {number}" for name, number in self._oldest_compilers.items())
            raise ConanInvalidConfiguration(
                f"chunkattn needs {wanted} or newer; the profile has {compiler} {version}")

    def source(self):
        get(self, **self.conan_data["sources"][self.version], strip_root=True)

    def package(self):
        copy(self, "LICENSE", self.source_folder, os.path.join(self.package_folder, "licenses"))
        for pattern in ("*.hpp", "*.h", "*.ipp", "*.cuh"):
            copy(self, pattern, os.path.join(self.source_folder, "include"),
                 os.path.join(self.package_folder, "include"))
        for module in self._cmake_modules:
            copy(self, module, os.path.join(self.source_folder, "cmake"),
                 os.path.join(self.package_folder, self._cmake_folder))
        save(self, os.path.join(self.package_folder, self._cmake_folder, "chunkattn-cxx20.cmake"),
             "target_compile_features(chunkattn::chunkattn INTERFACE cxx_std_20)\n")

    # chunkattn_add_cuda_target(), which makes chunkattn::cuda where CUDAToolkit has been found, and
    # chunkattn_add_kernels().
    _cmake_modules = "chunkattn-cuda.cmake", "chunkattn-kernels.cmake"

    @property
    def _cmake_folder(self):
        return os.path.join("lib", "cmake", "chunkattn")

    def package_info(self):
        self.cpp_info.bindirs = []
        self.cpp_info.libdirs = []
        self.cpp_info.set_property("cmake_file_name", "chunkattn")
        self.cpp_info.set_property("cmake_target_name", "chunkattn::chunkattn")
        self.cpp_info.set_property("pkg_config_name", "chunkattn")
        self.cpp_info.set_property("cmake_build_modules", [
            os.path.join(self._cmake_folder, module)
            for module in ("chunkattn-cxx20.cmake", *self._cmake_modules)])
        self.cpp_info.system_libs = ["pthread"]
