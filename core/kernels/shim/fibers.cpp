// The fibers of a block, and the barriers that they wait at. ThreadSanitizer instruments nothing
// here except where stated; otherwise it would see the scheduler, which orders everything.
#include "shim.h"

#include <sys/mman.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>

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

#if !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__)
#define UNWATCHED
#endif
// Fibers switch by a few instructions where these are known: `swapcontext` makes a system call for
// signals each time, and AddressSanitizer's version of it clears the record of a whole stack.
#if defined(__x86_64__)
#define FAST_SWITCH
extern "C" void shim_switch(void **from, void *to);
asm(R"(
.text
.globl shim_switch
.type shim_switch, @function
shim_switch:
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
.size shim_switch, .-shim_switch
)");
#endif

namespace shim {
namespace {

constexpr unsigned MOST_THREADS = 1024, LANES = 32;
constexpr size_t STACK = 64 << 10;
// Shared memory per block: the least of any GPU with bf16 tensor cores.
constexpr size_t SHARED_BYTES = 99 << 10;
constexpr unsigned MOST_WORDS = 6, MOST_COPIES = 64;

struct Copy {
    void *to;
    const void *from;
    unsigned bytes;
};

struct Fiber {
    Thread thread;
    uint64_t slot;                 // its value in a shuffle
    uint32_t words[2][MOST_WORDS]; // the words for its warp, current and previous
    unsigned turn;                 // the index of the current words
    Copy copies[MOST_COPIES];      // copies that it has begun and not waited for
    unsigned copy_count;
#if defined(FAST_SWITCH)
    void *context; // its saved stack pointer
#else
    ucontext_t context;
#endif
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
unsigned ready[MOST_THREADS], ready_count;
unsigned at_block_barrier, at_warp_barrier[MOST_THREADS / LANES], ended_count;
#if defined(FAST_SWITCH)
void *scheduler;
#else
ucontext_t scheduler;
#endif
const Launch *launched;
uint64_t random_state;
SharedArray arrays[16];
unsigned array_count;
size_t shared_used;
#if defined(__SANITIZE_THREAD__)
char *shared_memory;
#endif
// Addresses that stand for the barriers, and for the start and the end of blocks.
char block_order, warp_order[MOST_THREADS / LANES], start_order, end_order;
#if defined(__SANITIZE_THREAD__)
void *scheduler_detector;
// ThreadSanitizer's fibers. If a fiber is reused, its old accesses count as the new thread's. So a
// few consecutive blocks get fibers of their own, two if they have 256 threads, and races between
// these blocks are found. They are few because each barrier takes time by the number of fibers. Each
// fiber has its own stack, and each block its own shared memory, since reuse would be reported as a
// race.
constexpr unsigned MOST_BLOCKS = 6, MOST_FIBERS = 512;
void *detectors[MOST_THREADS];
unsigned detector_count, block_count;
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

// Switches from a fiber to the scheduler.
UNSEEN void leave(bool ended) {
    Fiber &fiber = fibers[current];
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_start_switch_fiber(ended ? nullptr : &fiber.fake_stack, scheduler_stack, scheduler_stack_size);
#endif
#if defined(__SANITIZE_THREAD__)
    __tsan_switch_to_fiber(scheduler_detector, __tsan_switch_to_fiber_no_sync);
#endif
#if defined(FAST_SWITCH)
    shim_switch(&fiber.context, scheduler);
#else
    swapcontext(&fiber.context, &scheduler);
#endif
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(fiber.fake_stack, &scheduler_stack, &scheduler_stack_size);
#endif
    (void)ended;
}

// Calls sanitized code. A separate function, so that ThreadSanitizer instruments it.
__attribute__((noinline)) void run_kernel() { launched->run(launched->arguments); }

UNSEEN void enter() {
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(nullptr, &scheduler_stack, &scheduler_stack_size);
#endif
    acquire(&start_order);
    run_kernel();
    if (fibers[current].copy_count > 0) fail("a thread ends before its copies do");
    release(&end_order);
    ended_count++;
    leave(true);
}

// Switches from the scheduler to a fiber.
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
#if defined(FAST_SWITCH)
    shim_switch(&scheduler, fiber.context);
#else
    swapcontext(&scheduler, &fiber.context);
#endif
#if defined(__SANITIZE_ADDRESS__)
    __sanitizer_finish_switch_fiber(scheduler_fake_stack, nullptr, nullptr);
#endif
}

UNSEEN void make_ready(unsigned first, unsigned end) {
    for (unsigned i = first; i < end; i++) ready[ready_count++] = i;
}

// Maps memory without ThreadSanitizer noticing. It would treat the whole length as written, again
// and again.
UNSEEN void *map(size_t bytes) {
    long address = syscall(SYS_mmap, nullptr, bytes, PROT_READ | PROT_WRITE,
                           MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0L);
    if (address == -1) fail("no memory");
    return (void *)address;
}

// Orders everything done in earlier blocks before what begins later.
UNSEEN void end_blocks() {
    acquire(&end_order);
    release(&start_order);
#if defined(__SANITIZE_THREAD__)
    detector_count = block_count = 0;
#endif
}

UNSEEN void start_fiber(unsigned index, unsigned block) {
    Fiber &fiber = fibers[index];
    auto in = [](unsigned i, Dim size) { return Dim{i % size.x, i / size.x % size.y, i / size.x / size.y}; };
    Dim block_size = {launched->block, launched->block_y, launched->block_z};
    Dim grid_size = {launched->grid, launched->grid_y, launched->grid_z};
    fiber.thread = {in(index, block_size), in(block, grid_size), block_size, grid_size};
    fiber.turn = fiber.copy_count = 0;
    static char *const stacks = (char *)map(STACK * MOST_THREADS);
#if defined(__SANITIZE_THREAD__)
    fiber.stack = stacks + STACK * (detector_count + index);
#else
    fiber.stack = stacks + STACK * index;
#endif
#if defined(FAST_SWITCH)
#if defined(__SANITIZE_ADDRESS__)
    __asan_unpoison_memory_region(fiber.stack, STACK); // the last fiber here left its frames without returning
#endif
    // A stack as if `enter` had called `shim_switch` at its beginning: six registers and the return
    // address.
    void **top = (void **)((char *)fiber.stack + STACK) - 1;
    *--top = (void *)enter;
    for (int i = 0; i < 6; i++) *--top = nullptr;
    fiber.context = top;
#else
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack;
    fiber.context.uc_stack.ss_size = STACK;
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, enter, 0);
#endif
#if defined(__SANITIZE_THREAD__)
    void *&detector = detectors[detector_count + index];
    if (!detector) detector = __tsan_create_fiber(0);
    fiber.race_detector = detector;
#endif
}

UNSEEN void run_block(unsigned block) {
    count = launched->block * launched->block_y * launched->block_z;
#if defined(__SANITIZE_THREAD__)
    static char *const shared_memories = (char *)map(SHARED_BYTES * MOST_BLOCKS);
    if (block_count == MOST_BLOCKS || detector_count + count > MOST_FIBERS) end_blocks();
    shared_memory = shared_memories + SHARED_BYTES * block_count++;
#endif
    ready_count = ended_count = 0;
    for (unsigned i = 0; i < count; i++) start_fiber(i, block);
    make_ready(0, count);
    while (ready_count > 0) {
        unsigned picked = draw(ready_count), index = ready[picked];
        ready[picked] = ready[--ready_count];
        go_on(index);
    }
    if (ended_count != count) fail("threads wait at a barrier that the others do not reach");
#if defined(__SANITIZE_THREAD__)
    detector_count += count;
#elif !defined(UNWATCHED)
    for (unsigned i = 0; i < array_count; i++) free(arrays[i].memory);
#endif
    array_count = 0;
    shared_used = 0;
}

} // namespace

UNSEEN unsigned lane() { return current % LANES; }

UNSEEN const Thread &self() { return fibers[current].thread; }

#if defined(UNWATCHED)
// Shared memory of the running block. Its addresses share one upper half, for code that keeps the
// lower half only.
char *shared_memory_start() {
    static char *const memory = [] {
        char *start = (char *)map(2 * SHARED_BYTES);
        return (uintptr_t)start >> 32 == (uintptr_t)(start + SHARED_BYTES) >> 32 ? start : start + SHARED_BYTES;
    }();
    return memory;
}
#endif

UNSEEN void *shared(int site, size_t bytes) {
    for (unsigned i = 0; i < array_count; i++) {
        if (arrays[i].site == site) return arrays[i].memory;
    }
    if (array_count == sizeof arrays / sizeof *arrays) fail("too many shared arrays");
    shared_used += (bytes + 15) / 16 * 16;
    if (shared_used > SHARED_BYTES) fail("more than 99 KiB of shared memory");
    // Each block has fresh memory with garbage; AddressSanitizer checks accesses past its end.
#if defined(__SANITIZE_THREAD__)
    void *memory = shared_memory + shared_used - (bytes + 15) / 16 * 16;
#elif defined(UNWATCHED)
    void *memory = shared_memory_start() + shared_used - (bytes + 15) / 16 * 16;
    memset(memory, 0xff, bytes);
#else
    void *memory = malloc(bytes);
    memset(memory, 0xff, bytes);
#endif
    arrays[array_count++] = {site, memory, bytes};
    return memory;
}

UNSEEN void *dynamic_shared() {
    if (launched->shared_bytes == 0) fail("a launch without the shared memory that the kernel asks for");
    return shared(-1, launched->shared_bytes);
}

UNSEEN void block_barrier() {
    release(&block_order);
    if (++at_block_barrier == count) {
        at_block_barrier = 0;
        make_ready(0, count);
    }
    leave(false);
    acquire(&block_order);
}

// Waits until all lanes are here, without ordering memory.
UNSEEN static void meet() {
    unsigned warp = current / LANES, first = warp * LANES, end = first + LANES < count ? first + LANES : count;
    if (++at_warp_barrier[warp] == end - first) {
        at_warp_barrier[warp] = 0;
        make_ready(first, end);
    }
    leave(false);
}

UNSEEN void warp_barrier() {
    char *order = &warp_order[current / LANES];
    release(order);
    meet();
    acquire(order);
}

// Orders no memory, as CUDA's shuffles do not.
UNSEEN uint64_t exchange(uint64_t bits, unsigned mask) {
    fibers[current].slot = bits;
    meet();
    uint64_t other = fibers[current ^ mask].slot;
    meet();
    return other;
}

UNSEEN void publish(const uint32_t *words, unsigned count) {
    if (count > MOST_WORDS) fail("more words than a lane gives its warp");
    Fiber &fiber = fibers[current];
    fiber.turn ^= 1;
    for (unsigned i = 0; i < count; i++) fiber.words[fiber.turn][i] = words[i];
    meet();
}

UNSEEN const uint32_t *published(unsigned lane) {
    return fibers[current / LANES * LANES + lane].words[fibers[current].turn];
}

// A copy's accesses, which the sanitizers attribute to the fiber.
__attribute__((noinline)) static void write_garbage(void *to, unsigned bytes) { memset(to, 0xff, bytes); }

__attribute__((noinline)) static void carry_out(void *to, const void *from, unsigned bytes) {
    if (from) memcpy(to, from, bytes);
    else memset(to, 0, bytes);
}

UNSEEN void begin_copy(void *to, const void *from, unsigned bytes) {
    Fiber &fiber = fibers[current];
    if (fiber.copy_count == MOST_COPIES) fail("too many copies that nobody waits for");
    fiber.copies[fiber.copy_count++] = {to, from, bytes};
    write_garbage(to, bytes);
}

UNSEEN void end_copies() {
    Fiber &fiber = fibers[current];
    for (unsigned i = 0; i < fiber.copy_count; i++) {
        Copy copy = fiber.copies[i];
        carry_out(copy.to, copy.from, copy.bytes);
    }
    fiber.copy_count = 0;
}

UNSEEN void launch(const Launch &what, uint64_t seed) {
    launched = &what;
    random_state = seed * 2862933555777941757ull + 3037000493ull;
    current = 0;
    uint64_t threads = (uint64_t)what.block * what.block_y * what.block_z, blocks = what.grid;
    blocks *= (uint64_t)what.grid_y * what.grid_z;
    if (threads == 0 || threads > MOST_THREADS || blocks == 0 || blocks > 0x7fffffffu) {
        fprintf(stderr, "shim: %s: CUDA refuses %lu blocks of %lu threads\n", what.name, (unsigned long)blocks,
                (unsigned long)threads);
        _exit(97);
    }
    // Blocks also run in a random order: the step has no common divisor with their number.
    unsigned step = 1 + draw((unsigned)blocks);
    auto divisor = [](unsigned a, unsigned b) {
        while (b != 0) {
            unsigned rest = a % b;
            a = b;
            b = rest;
        }
        return a;
    };
    while (divisor(step, (unsigned)blocks) != 1) step++;
    uint64_t block = draw((unsigned)blocks);
    release(&start_order);
    for (unsigned i = 0; i < blocks; i++, block = (block + step) % blocks) run_block((unsigned)block);
    end_blocks();
}

} // namespace shim
