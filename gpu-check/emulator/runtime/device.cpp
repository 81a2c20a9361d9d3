// Runtime for kernels: fibers, shared memory, and an end of the program at accesses that a GPU
// refuses.
#include <csignal>
#include <unistd.h>

#include "fibers.cpp"

namespace ptx {
uint64_t device_start, device_end, shared_window;

[[noreturn]] void fault(const char *what, uint64_t address);
} // namespace ptx

namespace {
const char *running; // the kernel, while one runs

void said(const char *what, uint64_t address) {
    char line[512];
    int length = snprintf(line, sizeof line, "gpu emulator: kernel `%s`: %s, %#llx\n", running ? running : "none", what,
                          (unsigned long long)address);
    if (write(2, line, (size_t)length) < 0) _exit(98);
}

struct sigaction before;

void on_signal(int signal, siginfo_t *info, void *context) {
    if (running) {
        said("memory that is not allocated, or freed", (uint64_t)(uintptr_t)info->si_addr);
        _exit(97);
    }
    // Not a fault of a kernel.
    if (before.sa_flags & SA_SIGINFO && before.sa_sigaction) before.sa_sigaction(signal, info, context);
    else sigaction(signal, &before, nullptr);
}
} // namespace

[[noreturn]] void ptx::fault(const char *what, uint64_t address) {
    said(what, address);
    _exit(97);
}

// From now on until `fulgurite_end`, accesses belong to this kernel.
extern "C" void fulgurite_begin(const char *kernel, uint64_t device_start, uint64_t device_end) {
    static bool installed = [] {
        struct sigaction action = {};
        action.sa_sigaction = on_signal;
        action.sa_flags = SA_SIGINFO | SA_ONSTACK;
        return sigaction(SIGSEGV, &action, &before) == 0;
    }();
    (void)installed;
    running = kernel;
    ptx::device_start = device_start;
    ptx::device_end = device_end;
    ptx::shared_window = (uint64_t)(uintptr_t)shim::shared_memory_start() >> 32 << 32;
}

extern "C" void fulgurite_end() { running = nullptr; }

// Blocks of threads that depend on each other.
extern "C" void fulgurite_launch(const char *kernel, const unsigned *grid, const unsigned *block, unsigned shared_bytes,
                                 void (*run)(const uint8_t *), const uint8_t *arguments, uint64_t seed) {
    shim::launch({kernel, grid[0], block[0], shared_bytes, run, arguments, grid[1], grid[2], block[1], block[2]}, seed);
}
