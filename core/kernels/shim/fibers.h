// Launching a kernel: a grid is a loop over its blocks.
#pragma once
#include <cstdint>
#include <unistd.h>

namespace shim {
struct Launch {
    const char *name;
    unsigned grid, block, shared_bytes;
    void (*run)(const uint8_t *arguments);
    const uint8_t *arguments;
    // The other two dimensions.
    unsigned grid_y = 1, grid_z = 1, block_y = 1, block_z = 1;
};
void launch(const Launch &what, uint64_t seed);
} // namespace shim
