// A kernel by name, called with arguments of eight bytes each.
#pragma once
#include <cstring>
#include <tuple>
#include <utility>

struct Entry {
    const char *name;
    size_t parameters;
    void (*run)(const uint8_t *arguments);
};

template <auto kernel> struct Caller;

template <class... Parameter, void (*kernel)(Parameter...)> struct Caller<kernel> {
    static constexpr size_t parameters = sizeof...(Parameter);

    template <class T> static T argument(const uint8_t *arguments, size_t index) {
        static_assert(sizeof(T) <= 8);
        T value;
        memcpy(&value, arguments + 8 * index, sizeof value);
        return value;
    }

    template <size_t... index> static void call(const uint8_t *arguments, std::index_sequence<index...>) {
        kernel(argument<Parameter>(arguments, index)...);
    }

    static void run(const uint8_t *arguments) { call(arguments, std::index_sequence_for<Parameter...>()); }
};
