// The executor that runs kernels from PTX (simt/executor.hpp): those of the modules in the files
// that CHUNKATTN_PTX names, parted by colons. A kernel that none of them has goes to the emulator.
// At the end the program prints what has been run, and writes to the file that CHUNKATTN_PTX_FORMS
// names how much ("counted" LAUNCHES INSTRUCTIONS MMA), which forms of the kernels were executed
// ("executed" FORM) and which were not ("held" FORM).
#include "simt/executor.hpp"

#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <map>
#include <random>
#include <set>
#include <sstream>
#include <string>

#include "ptx/allocations.hpp"
#include "ptx/module.hpp"
#include "ptx/run.hpp"

namespace ptxrun {
namespace {

class Library {
 public:
  explicit Library(const char* paths) {
    (void)statistics();  // lives longer, and the forms do
    std::istringstream files(paths);
    for (std::string path; std::getline(files, path, ':');) {
      std::ifstream file(path);
      std::ostringstream text;
      text << file.rdbuf();
      if (!file) throw Fault("cannot read " + path);
      split(text.str());
    }
    const char* seed = std::getenv("CHUNKATTN_SEED");
    seed_ = seed != nullptr ? std::strtoull(seed, nullptr, 10) : std::random_device()();
    std::printf("ptx: %zu kernels, turns by CHUNKATTN_SEED=%llu\n", texts_.size(),
                static_cast<unsigned long long>(seed_));
  }
  ~Library() {
    const Statistics& counts = statistics();
    std::size_t forms = 0;
    for (const u64 n : counts.by_form) forms += n > 0 ? 1 : 0;
    std::printf("ptx: %llu launches, %llu instructions of warps, %llu mma, %zu forms\n",
                static_cast<unsigned long long>(counts.launches),
                static_cast<unsigned long long>(counts.instructions),
                static_cast<unsigned long long>(counts.mma), forms);
    for (const std::string& name : emulated_)
      std::printf("ptx: emulated, no PTX of %s\n", name.c_str());
    report(counts);
  }
  Library(const Library&) = delete;
  Library& operator=(const Library&) = delete;

  bool run(const simt::KernelCall& call) {
    Dl_info info{};
    const bool exported = dladdr(call.kernel, &info) != 0 && info.dli_saddr == call.kernel &&
                          info.dli_sname != nullptr;
    const std::string name = exported ? info.dli_sname : "a kernel of internal linkage";
    const auto text = texts_.find(name);
    if (text == texts_.end()) {
      emulated_.insert(name);
      return false;
    }
    if (entries_.find(name) == entries_.end()) entries_.merge(read_module(text->second));
    ptxrun::run(entries_.at(name), {call.grid, call.threads, call.shared_bytes, call.arguments,
                                    call.argument_bytes, ++seed_});
    return true;
  }

 private:
  // Most programs launch few of the kernels: each is a module of its own, and read when it is
  // launched.
  void split(const std::string& module) {
    static const std::string begin = ".visible .entry ";
    std::size_t at = module.find(begin);
    const std::string head = module.substr(0, at);
    while (at != module.npos) {
      const std::size_t next = module.find(begin, at + 1), name = at + begin.size();
      texts_[module.substr(name, module.find('(', name) - name)] =
          head + module.substr(at, next - at);
      at = next;
    }
  }
  void report(const Statistics& counts) const {
    const char* path = std::getenv("CHUNKATTN_PTX_FORMS");
    if (path == nullptr) return;
    std::ofstream file(path);
    std::set<std::string> executed, held;
    for (const auto& [name, entry] : entries_)
      for (const Instruction& i : entry.code)
        (counts.by_form[static_cast<std::size_t>(i.form->number)] > 0 ? executed : held)
            .insert(i.form->name.substr(0, i.form->name.find('/')));
    file << "counted " << counts.launches << " " << counts.instructions << " " << counts.mma
         << "\n";
    for (const std::string& form : executed) file << "executed " << form << "\n";
    for (const std::string& form : held) file << "held " << form << "\n";
  }

  std::map<std::string, std::string> texts_;
  std::map<std::string, Entry> entries_;
  std::set<std::string> emulated_;
  u64 seed_ = 0;
};

bool execute(const simt::KernelCall& call) {
  static Library library(std::getenv("CHUNKATTN_PTX"));
  return library.run(call);
}

const bool installed = [] {
  if (std::getenv("CHUNKATTN_PTX") == nullptr) return false;
  watch_allocations();
  simt::executor() = execute;
  return true;
}();

}  // namespace
}  // namespace ptxrun
