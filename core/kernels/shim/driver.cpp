// Reads memory and launches from files, runs them, and writes the memory back. `tests/it/shim`
// writes the files, and generates `entries.inc` from the table of kernels in Rust. A kernel whose
// parameters differ from the table does not compile.
#include "shim.h"

#include <cstddef>
#include <iostream>
#include <string>
#include <vector>

#include "fibers.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

#include "entries.inc"

namespace {

std::vector<uint8_t> input;
size_t at;

const uint8_t *take(size_t bytes) {
    if (input.size() - at < bytes) {
        fprintf(stderr, "shim: the request is cut off\n");
        exit(96);
    }
    at += bytes;
    return input.data() + at - bytes;
}

uint64_t number() {
    uint64_t value;
    memcpy(&value, take(8), 8);
    return value;
}

struct Memory {
    uint8_t *start;
    size_t bytes;
};

std::vector<Memory> memory;

// Addresses in a request hold the index of the memory, from one, and the offset.
uint64_t real_address(uint64_t address) {
    if (address == 0) return 0;
    size_t index = (address >> 40) - 1;
    if (index >= memory.size()) {
        fprintf(stderr, "shim: there is no memory of the address %llx\n", (unsigned long long)address);
        exit(96);
    }
    return (uint64_t)(uintptr_t)memory[index].start + (address & ((1ull << 40) - 1));
}

float value_of(const uint8_t *start, uint64_t at, uint64_t dtype) {
    if (dtype == F32) return load(((const float *)start)[at]);
    return dtype == BF16 ? load(((const bf16 *)start)[at]) : load(((const f16 *)start)[at]);
}

void set_value(uint8_t *start, uint64_t at, uint64_t dtype, float x) {
    if (dtype == F32) return store(((float *)start)[at], x);
    return dtype == BF16 ? store(((bf16 *)start)[at], x) : store(((f16 *)start)[at], x);
}

// Computes a product as cuBLAS documents it, and checks cuBLAS's conditions on the arguments. False
// if they are not met.
bool product() {
    uint64_t dtype = number(), out = number();
    const uint8_t *a = (const uint8_t *)real_address(number()), *b = (const uint8_t *)real_address(number());
    uint8_t *c = (uint8_t *)real_address(number());
    bool a_turned = number(), b_turned = number();
    uint64_t m = number(), n = number(), k = number();
    uint64_t lda = number(), ldb = number(), ldc = number(), batch = number();
    uint64_t stride_a = number(), stride_b = number(), stride_c = number();
    float factors[2];
    for (float &factor : factors) {
        uint32_t bits = (uint32_t)number();
        memcpy(&factor, &bits, 4);
    }
    if (lda < (a_turned ? k : m) || ldb < (b_turned ? n : k) || ldc < m || (out != dtype && out != F32)) return false;
    for (uint64_t index = 0; index < batch; index++) {
        for (uint64_t column = 0; column < n; column++) {
            for (uint64_t row = 0; row < m; row++) {
                float sum = 0;
                for (uint64_t l = 0; l < k; l++) {
                    uint64_t at_a = index * stride_a + (a_turned ? row * lda + l : l * lda + row);
                    uint64_t at_b = index * stride_b + (b_turned ? l * ldb + column : column * ldb + l);
                    sum += value_of(a, at_a, dtype) * value_of(b, at_b, dtype);
                }
                uint64_t at_c = index * stride_c + column * ldc + row;
                float old = factors[1] == 0 ? 0 : factors[1] * value_of(c, at_c, out);
                set_value(c, at_c, out, factors[0] * sum + old);
            }
        }
    }
    return true;
}

// Runs a request and writes its answer. False if a file cannot be read or written.
bool run(const char *request, const char *answer) {
    FILE *file = fopen(request, "rb");
    if (!file) return false;
    fseek(file, 0, SEEK_END);
    input.resize((size_t)ftell(file));
    rewind(file);
    if (fread(input.data(), 1, input.size(), file) != input.size()) return false;
    fclose(file);
    at = 0;

    uint64_t seed = number();
    for (uint64_t n = number(); n > 0; n--) {
        size_t bytes = number();
        // Aligned as by CUDA; it ends exactly where the elements end. At least one byte.
        void *start;
        if (posix_memalign(&start, 256, bytes ? bytes : 1) != 0) return false;
        memcpy(start, take(bytes), bytes);
#if defined(__SANITIZE_ADDRESS__)
        if (bytes == 0) __asan_poison_memory_region(start, 1);
#endif
        memory.push_back({(uint8_t *)start, bytes});
    }
    for (uint64_t n = number(); n > 0; n--) {
        uint64_t place = real_address(number());
        uint64_t address;
        memcpy(&address, (void *)place, 8);
        address = real_address(address);
        memcpy((void *)place, &address, 8);
    }
    for (uint64_t n = number(); n > 0; n--) {
        size_t length = number();
        if (length == 0) { // kernels have names; products do not
            if (product()) continue;
            fprintf(stderr, "shim: a product that cuBLAS refuses\n");
            exit(96);
        }
        std::string name((const char *)take(length), length);
        unsigned grid = (unsigned)number(), block = (unsigned)number(), shared = (unsigned)number();
        std::vector<uint8_t> arguments;
        for (uint64_t count = number(); count > 0; count--) {
            uint64_t is_address = number(), value = number();
            if (is_address) value = real_address(value);
            arguments.insert(arguments.end(), (uint8_t *)&value, (uint8_t *)&value + 8);
        }
        const Entry *entry = nullptr;
        for (const Entry &other : entries) {
            if (name == other.name) entry = &other;
        }
        if (!entry || arguments.size() != 8 * entry->parameters) {
            fprintf(stderr, "shim: no kernel %s with %zu arguments\n", name.c_str(), arguments.size() / 8);
            exit(96);
        }
        shim::launch({entry->name, grid, block, shared, entry->run, arguments.data()}, seed);
    }
    file = fopen(answer, "wb");
    if (!file) return false;
    for (const Memory &m : memory) {
        if (fwrite(m.start, 1, m.bytes, file) != m.bytes) return false;
#if defined(__SANITIZE_ADDRESS__)
        if (m.bytes == 0) __asan_unpoison_memory_region(m.start, 1);
#endif
        free(m.start);
    }
    memory.clear();
    return fclose(file) == 0;
}

} // namespace

// Standard input holds pairs of lines, the paths of a request and of its answer. A line is printed
// for each answer. Many requests share a process, since ThreadSanitizer's fibers are slow to make.
int main() {
    std::string request, answer;
    while (std::getline(std::cin, request) && std::getline(std::cin, answer)) {
        if (!run(request.c_str(), answer.c_str())) return 96;
        std::cout << "done" << std::endl;
    }
}
