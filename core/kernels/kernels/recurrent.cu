// One step of a GRU or an LSTM, one block per chunk of the states, `[batch, width]`. Gates are
// `[batch, gates, width]`, in PyTorch's order. `product` is the hidden state's product, and `bias` the
// bias of it, or null.

DEVICE float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

DEVICE float with_bias(const float *product, const float *bias, u64 at, u64 gate) {
    return bias ? product[at] + bias[gate] : product[at];
}

// `gates` holds the inputs' product and becomes the gates. `kept` is the product for the new gate.
KERNEL gru_step(float *gates, const float *product, const float *bias, const float *before, float *kept, float *hidden,
                u64 n, u64 width) {
    u64 start = (u64)blockIdx.x * CHUNK;
    for (u64 i = start + threadIdx.x; i < n && i - start < CHUNK; i += THREADS) {
        u64 unit = i % width, at = i / width * 3 * width + unit;
        float reset = sigmoid(gates[at] + with_bias(product, bias, at, unit));
        float update = sigmoid(gates[at + width] + with_bias(product, bias, at + width, unit + width));
        float of_new = with_bias(product, bias, at + 2 * width, unit + 2 * width);
        float fresh = tanhf(gates[at + 2 * width] + reset * of_new);
        gates[at] = reset;
        gates[at + width] = update;
        gates[at + 2 * width] = fresh;
        kept[i] = of_new;
        hidden[i] = fresh + update * (before[i] - fresh);
    }
}

// `of_hidden` holds the gradient from later steps. It becomes the gradient of the state before, to
// which the caller adds the product's part.
KERNEL gru_step_backward(const float *gates, const float *before, const float *kept, const float *grad,
                         float *of_hidden, float *inputs, float *products, u64 n, u64 width) {
    u64 start = (u64)blockIdx.x * CHUNK;
    for (u64 i = start + threadIdx.x; i < n && i - start < CHUNK; i += THREADS) {
        u64 at = i / width * 3 * width + i % width;
        float reset = gates[at], update = gates[at + width], fresh = gates[at + 2 * width];
        float dh = of_hidden[i] + grad[i];
        float of_new = dh * (1 - update) * (1 - fresh * fresh);
        float of_reset = of_new * kept[i] * reset * (1 - reset);
        float of_update = dh * (before[i] - fresh) * update * (1 - update);
        inputs[at] = products[at] = of_reset;
        inputs[at + width] = products[at + width] = of_update;
        inputs[at + 2 * width] = of_new;
        products[at + 2 * width] = of_new * reset;
        of_hidden[i] = dh * update;
    }
}

// `before` and `cell` are cell states.
KERNEL lstm_step(float *gates, const float *product, const float *bias, const float *before, float *cell,
                 float *hidden, u64 n, u64 width) {
    u64 start = (u64)blockIdx.x * CHUNK;
    for (u64 i = start + threadIdx.x; i < n && i - start < CHUNK; i += THREADS) {
        u64 unit = i % width, at = i / width * 4 * width + unit;
        float sums[4];
        for (u64 gate = 0; gate < 4; gate++) {
            u64 skipped = gate * width;
            sums[gate] = gates[at + skipped] + with_bias(product, bias, at + skipped, unit + skipped);
        }
        float input = sigmoid(sums[0]), forget = sigmoid(sums[1]), fresh = tanhf(sums[2]), output = sigmoid(sums[3]);
        float state = forget * before[i] + input * fresh;
        gates[at] = input;
        gates[at + width] = forget;
        gates[at + 2 * width] = fresh;
        gates[at + 3 * width] = output;
        cell[i] = state;
        hidden[i] = output * tanhf(state);
    }
}

// As `gru_step_backward`. `of_cell` is for the cell state; the whole gradient of the hidden state
// before is the product's part.
KERNEL lstm_step_backward(const float *gates, const float *before, const float *cell, const float *grad,
                          const float *of_hidden, float *of_cell, float *inputs, u64 n, u64 width) {
    u64 start = (u64)blockIdx.x * CHUNK;
    for (u64 i = start + threadIdx.x; i < n && i - start < CHUNK; i += THREADS) {
        u64 at = i / width * 4 * width + i % width;
        float input = gates[at], forget = gates[at + width], fresh = gates[at + 2 * width];
        float output = gates[at + 3 * width], shown = tanhf(cell[i]);
        float dh = of_hidden[i] + grad[i];
        float dc = of_cell[i] + dh * output * (1 - shown * shown);
        inputs[at] = dc * fresh * input * (1 - input);
        inputs[at + width] = dc * before[i] * forget * (1 - forget);
        inputs[at + 2 * width] = dc * input * (1 - fresh * fresh);
        inputs[at + 3 * width] = dh * shown * output * (1 - output);
        of_cell[i] = dc * forget;
    }
}
