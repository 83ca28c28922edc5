// Fibers: stacks that take turns on one thread. A few instructions on x86-64, ucontext elsewhere.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <vector>

#if defined(__SANITIZE_ADDRESS__)
#define SIMT_ASAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define SIMT_ASAN 1
#endif
#endif
#if defined(SIMT_ASAN)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

#if defined(__x86_64__)
// Saves the callee-saved registers on this stack, goes to the other one. extern "C" and weak: one
// definition, in whichever test includes this.
extern "C" void chunkattn_simt_switch(void** save, void* load);
asm(R"(
.weak chunkattn_simt_switch
.type chunkattn_simt_switch, @function
chunkattn_simt_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size chunkattn_simt_switch, .-chunkattn_simt_switch
)");
#else
#include <ucontext.h>
#endif

namespace simt {

inline void unpoison_region([[maybe_unused]] void* begin, [[maybe_unused]] std::size_t bytes) {
#if defined(SIMT_ASAN)
  __asan_unpoison_memory_region(begin, bytes);
#endif
}

struct FiberStack {
  static constexpr std::size_t size = std::size_t{128} << 10;
  std::unique_ptr<unsigned char[]> memory{new unsigned char[size]};
};

/// Runs `entry(argument)` in turns with whoever calls resume(). Abandoning one is allowed.
class Fiber {
 public:
  void start(FiberStack& stack, void (*entry)(void*), void* argument) {
    entry_ = entry;
    argument_ = argument;
    stack_ = stack.memory.get();
    unpoison_region(stack_, FiberStack::size);
#if defined(__x86_64__)
    auto top = reinterpret_cast<std::uintptr_t>(stack_ + FiberStack::size) & ~std::uintptr_t{15};
    void** frame = reinterpret_cast<void**>(top) - 2;
    frame[0] = reinterpret_cast<void*>(&Fiber::trampoline);  // returned to; rsp % 16 == 8 then
    frame[1] = nullptr;
    frame -= 6;  // six registers
    for (int i = 0; i < 6; ++i) frame[i] = nullptr;
    context_ = frame;
#else
    getcontext(&context_);
    context_.uc_stack.ss_sp = stack_;
    context_.uc_stack.ss_size = FiberStack::size;
    context_.uc_link = nullptr;
    makecontext(&context_, reinterpret_cast<void (*)()>(&Fiber::trampoline), 0);
#endif
  }

  void resume() {
    starting() = this;
#if defined(SIMT_ASAN)
    void* fake = nullptr;
    __sanitizer_start_switch_fiber(&fake, stack_, FiberStack::size);
#endif
    swap(caller_, context_);
#if defined(SIMT_ASAN)
    __sanitizer_finish_switch_fiber(fake, nullptr, nullptr);
#endif
  }

  void yield() {
#if defined(SIMT_ASAN)
    void* fake = nullptr;
    __sanitizer_start_switch_fiber(&fake, caller_stack_, caller_size_);
#endif
    swap(context_, caller_);
#if defined(SIMT_ASAN)
    __sanitizer_finish_switch_fiber(fake, &caller_stack_, &caller_size_);
#endif
  }

 private:
#if defined(__x86_64__)
  using Context = void*;
  static void swap(Context& from, Context& to) { chunkattn_simt_switch(&from, to); }
#else
  using Context = ucontext_t;
  static void swap(Context& from, Context& to) { swapcontext(&from, &to); }
#endif

  static Fiber*& starting() {
    static Fiber* fiber = nullptr;
    return fiber;
  }
  static void trampoline() {
    Fiber* self = starting();
#if defined(SIMT_ASAN)
    __sanitizer_finish_switch_fiber(nullptr, &self->caller_stack_, &self->caller_size_);
#endif
    self->entry_(self->argument_);
    while (true) self->yield();
  }

  Context context_{}, caller_{};
  void (*entry_)(void*) = nullptr;
  void* argument_ = nullptr;
  unsigned char* stack_ = nullptr;
#if defined(SIMT_ASAN)
  const void* caller_stack_ = nullptr;
  std::size_t caller_size_ = 0;
#endif
};

}  // namespace simt
