// The fibers of a block, and the barriers that they wait at. Nothing here is instrumented for ThreadSanitizer but
// what says so: it would see the scheduler, which orders all.
#include "shim.h"

#include <sys/mman.h>
#include <sys/syscall.h>
#include <ucontext.h>

#include "fibers.h"

#if defined(__SANITIZE_THREAD__)
#include <sanitizer/tsan_interface.h>
#define UNSEEN __attribute__((no_sanitize("thread"), noinline))
#else
#define UNSEEN __attribute__((noinline))
#endif
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

namespace shim {
namespace {

constexpr unsigned MOST_THREADS = 1024, LANES = 32;
constexpr size_t STACK = 256 << 10;

enum class State { Ready, AtBlockBarrier, AtWarpBarrier, Ended };

struct Fiber {
    Thread thread;
    State state;
    uint64_t slot; // what it gives in a shuffle
    ucontext_t context;
    void *stack;
#if defined(__SANITIZE_THREAD__)
    void *race_detector;
#endif
#if defined(__SANITIZE_ADDRESS__)
    void *fake_stack;
#endif
};

struct SharedArray {
    int site;
    void *memory;
    size_t bytes;
};

Fiber fibers[MOST_THREADS];
unsigned count, current;
ucontext_t scheduler;
const Launch *launched;
uint64_t random_state;
SharedArray arrays[16];
unsigned array_count;
#if defined(__SANITIZE_THREAD__)
constexpr size_t SHARED_BYTES = 48 << 10;
char *shared_memory;
size_t shared_used;
#endif
// Addresses that stand for the barriers, and for the start and the end of blocks.
char block_order, warp_order[MOST_THREADS / LANES], start_order, end_order;
#if defined(__SANITIZE_THREAD__)
void *scheduler_detector;
// The race detector's threads. It takes an access of a thread whose number is used again for one of the new thread, so
// a few blocks in turn have threads of their own, and races between those are found: making one is slow. Each has a
// stack of its own, and each block shared memory, or there would be races in those.
constexpr unsigned MOST_BLOCKS = 6, MOST_STACKS = MOST_BLOCKS * 256;
void *detectors[MOST_STACKS];
unsigned detector_count, block_count;
#else
constexpr unsigned MOST_STACKS = MOST_THREADS;
#endif
#if defined(__SANITIZE_ADDRESS__)
void *scheduler_fake_stack;
const void *scheduler_stack;
size_t scheduler_stack_size;
#endif

UNSEEN unsigned draw(unsigned n) {
    random_state = random_state * 6364136223846793005ull + 1442695040888963407ull;
    return (unsigned)((random_state >> 33) % n);
}

UNSEEN void release(void *order) {
#if defined(__SANITIZE_THREAD__)
    __tsan_release(order);
#else
    (void)order;
#endif
}

UNSEEN void acquire(void *order) {
#if defined(__SANITIZE_THREAD__)
    __tsan_acquire(order);
#else
    (void)order;
#endif
}

[[noreturn]] UNSEEN void fail(const char *what) {
    fprintf(stderr, "shim: %s: %s, block %u of %u\n", launched->name, what, fibers[current].thread.block.x,
            fibers[current].thread.grid_size.x);
    fflush(stderr);
    _exit(97);
}

// From a fiber to the scheduler.
UNSEEN void leave(bool ended) {
    Fiber &fiber = fibers[current];
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_start_switch_fiber(ended ? nullptr : &fiber.fake_stack, scheduler_stack, scheduler_stack_size);
#endif
#if defined(__SANITIZE_THREAD__)
    __tsan_switch_to_fiber(scheduler_detector, __tsan_switch_to_fiber_no_sync);
#endif
    swapcontext(&fiber.context, &scheduler);
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(fiber.fake_stack, &scheduler_stack, &scheduler_stack_size);
#endif
    (void)ended;
}

// The calls of sanitized code. A function of its own, which ThreadSanitizer sees.
__attribute__((noinline)) void run_kernel() { launched->run(launched->arguments); }

UNSEEN void enter() {
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(nullptr, &scheduler_stack, &scheduler_stack_size);
#endif
    acquire(&start_order);
    run_kernel();
    release(&end_order);
    fibers[current].state = State::Ended;
    leave(true);
}

// From the scheduler to a fiber.
UNSEEN void go_on(unsigned index) {
    current = index;
    Fiber &fiber = fibers[index];
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_start_switch_fiber(&scheduler_fake_stack, fiber.stack, STACK);
#endif
#if defined(__SANITIZE_THREAD__)
    scheduler_detector = __tsan_get_current_fiber();
    __tsan_switch_to_fiber(fiber.race_detector, __tsan_switch_to_fiber_no_sync);
#endif
    swapcontext(&scheduler, &fiber.context);
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(scheduler_fake_stack, nullptr, nullptr);
#endif
}

UNSEEN unsigned in_state(State state, unsigned first, unsigned end) {
    unsigned n = 0;
    for (unsigned i = first; i < end; i++) n += fibers[i].state == state;
    return n;
}

// Lets those go on whose barrier all have reached.
UNSEEN void open_barriers() {
    for (unsigned first = 0; first < count; first += LANES) {
        unsigned end = first + LANES;
        if (in_state(State::AtWarpBarrier, first, end) != LANES) continue;
        for (unsigned i = first; i < end; i++) fibers[i].state = State::Ready;
    }
    if (in_state(State::AtBlockBarrier, 0, count) == count) {
        for (unsigned i = 0; i < count; i++) fibers[i].state = State::Ready;
    }
}

// Memory that ThreadSanitizer is not told of: it would take its whole length for written, again and again.
UNSEEN void *map(size_t bytes) {
    long address = syscall(SYS_mmap, nullptr, bytes, PROT_READ | PROT_WRITE,
                           MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0L);
    if (address == -1) fail("no memory");
    return (void *)address;
}

// All that was done in blocks is over: what begins later comes after it.
UNSEEN void end_blocks() {
    acquire(&end_order);
    release(&start_order);
#if defined(__SANITIZE_THREAD__)
    detector_count = block_count = 0;
#endif
}

UNSEEN void start_fiber(unsigned index, unsigned block) {
    Fiber &fiber = fibers[index];
    fiber.thread = {{index, 0, 0}, {block, 0, 0}, {launched->block, 1, 1}, {launched->grid, 1, 1}};
    fiber.state = State::Ready;
    static char *const stacks = (char *)map(STACK * MOST_STACKS);
#if defined(__SANITIZE_THREAD__)
    fiber.stack = stacks + STACK * (detector_count + index);
#else
    fiber.stack = stacks + STACK * index;
#endif
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack;
    fiber.context.uc_stack.ss_size = STACK;
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, enter, 0);
#if defined(__SANITIZE_THREAD__)
    void *&detector = detectors[detector_count + index];
    if (!detector) detector = __tsan_create_fiber(0);
    fiber.race_detector = detector;
#endif
}

UNSEEN void run_block(unsigned block) {
    count = launched->block;
#if defined(__SANITIZE_THREAD__)
    static char *const shared_memories = (char *)map(SHARED_BYTES * MOST_BLOCKS);
    if (block_count == MOST_BLOCKS || detector_count + count > MOST_STACKS) end_blocks();
    shared_used = 0;
    shared_memory = shared_memories + SHARED_BYTES * block_count++;
#endif
    for (unsigned i = 0; i < count; i++) start_fiber(i, block);
    for (;;) {
        unsigned ready = in_state(State::Ready, 0, count);
        if (ready == 0) {
            open_barriers();
            ready = in_state(State::Ready, 0, count);
        }
        if (ready == 0 && in_state(State::Ended, 0, count) == count) break;
        if (ready == 0) fail("threads wait at a barrier that the others do not reach");
        unsigned skip = draw(ready), index = 0;
        while (fibers[index].state != State::Ready || skip-- > 0) index++;
        go_on(index);
    }
#if defined(__SANITIZE_THREAD__)
    detector_count += count;
#else
    for (unsigned i = 0; i < array_count; i++) free(arrays[i].memory);
#endif
    array_count = 0;
}

} // namespace

UNSEEN const Thread &self() { return fibers[current].thread; }

UNSEEN void *shared(int site, size_t bytes) {
    for (unsigned i = 0; i < array_count; i++) {
        if (arrays[i].site == site) return arrays[i].memory;
    }
    if (array_count == sizeof arrays / sizeof *arrays) fail("too many shared arrays");
    // Memory of its own for each block, which holds garbage, and past whose end AddressSanitizer looks.
#if defined(__SANITIZE_THREAD__)
    void *memory = shared_memory + shared_used;
    shared_used += (bytes + 15) / 16 * 16;
    if (shared_used > SHARED_BYTES) fail("more than 48 KiB of shared memory");
#else
    void *memory = malloc(bytes);
    memset(memory, 0xff, bytes);
#endif
    arrays[array_count++] = {site, memory, bytes};
    return memory;
}

UNSEEN void block_barrier() {
    release(&block_order);
    fibers[current].state = State::AtBlockBarrier;
    leave(false);
    acquire(&block_order);
}

UNSEEN void warp_barrier() {
    char *order = &warp_order[current / LANES];
    release(order);
    fibers[current].state = State::AtWarpBarrier;
    leave(false);
    acquire(order);
}

UNSEEN uint64_t exchange(uint64_t bits, unsigned mask) {
    fibers[current].slot = bits;
    warp_barrier();
    uint64_t other = fibers[current ^ mask].slot;
    warp_barrier();
    return other;
}

UNSEEN void launch(const Launch &what, uint64_t seed) {
    launched = &what;
    random_state = seed * 2862933555777941757ull + 3037000493ull;
    current = 0;
    if (what.block == 0 || what.block > MOST_THREADS || what.block % LANES != 0 || what.grid == 0 ||
        what.grid > 0x7fffffffu) {
        fprintf(stderr, "shim: %s: CUDA refuses a grid of %u and blocks of %u\n", what.name, what.grid, what.block);
        _exit(97);
    }
    // Blocks in an order of their own, too: any that has no common divisor with their number.
    unsigned step = 1 + draw(what.grid);
    auto divisor = [](unsigned a, unsigned b) {
        while (b != 0) {
            unsigned rest = a % b;
            a = b;
            b = rest;
        }
        return a;
    };
    while (divisor(step, what.grid) != 1) step++;
    uint64_t block = draw(what.grid);
    release(&start_order);
    for (unsigned i = 0; i < what.grid; i++, block = (block + step) % what.grid) run_block((unsigned)block);
    end_blocks();
}

} // namespace shim
