// PTX instructions for a host compiler, for kernels that `translate.rs` writes. Registers are
// unsigned words; an instruction's type determines how their bits are read. Barriers and shared
// memory come from the shim of `core/kernels`.
#pragma once
#include "shim.h"
#undef KERNEL
#undef DEVICE
#undef SHARED
#define DEVICE inline
#include "common.cu"

#include <bit>
#include <cfenv>
#include <limits>
#include <utility>

namespace ptx {
typedef uint8_t u8;
typedef uint16_t u16;
typedef uint32_t u32;
typedef uint64_t u64;
typedef int8_t s8;
typedef int16_t s16;
typedef int32_t s32;
typedef int64_t s64;
typedef float f32;
typedef double f64;
using ::bf16;
using ::f16;

template <int SIZE> struct WordOf;
template <> struct WordOf<1> { typedef u8 type; };
template <> struct WordOf<2> { typedef u16 type; };
template <> struct WordOf<4> { typedef u32 type; };
template <> struct WordOf<8> { typedef u64 type; };
template <class T> using Word = typename WordOf<sizeof(T)>::type;

template <class T> constexpr bool is_half = std::is_same_v<T, f16> || std::is_same_v<T, bf16>;
template <class T> constexpr bool is_float = std::is_floating_point_v<T> || is_half<T>;

// A register's contents as this type.
template <class T, class R> inline T get(R bits) {
    if constexpr (std::is_same_v<R, bool>) return (T)bits;
    else {
        static_assert(sizeof(R) >= sizeof(T));
        return std::bit_cast<T>((Word<T>)bits);
    }
}

// A signed number fills a wider register with its sign.
template <class T, class R> inline void set(R &bits, T value) {
    if constexpr (std::is_same_v<R, bool>) bits = (bool)value;
    else if constexpr (std::is_integral_v<T> && std::is_signed_v<T>) bits = (R)(std::make_signed_t<R>)value;
    else bits = (R)std::bit_cast<Word<T>>(value);
}

// Types for computing: half precision uses f64, which holds its products and sums exactly.
template <class T> inline auto wide(T x) {
    if constexpr (is_half<T>) return (double)load(x);
    else return x;
}

template <class T, class W> inline T narrow(W x) {
    if constexpr (is_half<T>) {
        // Through f32 with the last bit set if it is inexact, so that rounding twice equals
        // rounding once.
        f32 once = (f32)x;
        if ((double)x != (double)once && x == x && std::isfinite(once)) {
            u32 bits = std::bit_cast<u32>(once);
            if (std::fabs((double)once) > std::fabs((double)x)) bits--;
            once = std::bit_cast<f32>(bits | 1);
        }
        T to;
        store(to, once);
        return to;
    } else return (T)x;
}

enum Rounding { RN, RZ, RM, RP };

template <Rounding R, class F> __attribute__((noinline)) auto in_mode(F f) {
    constexpr int modes[] = {FE_TONEAREST, FE_TOWARDZERO, FE_DOWNWARD, FE_UPWARD};
    std::fesetround(modes[R]);
    auto result = f();
    asm volatile("" : "+m"(result));
    std::fesetround(FE_TONEAREST);
    return result;
}
template <Rounding R, class F> inline auto rounded(F f) {
    if constexpr (R == RN) return f();
    else return in_mode<R>(f);
}

// Keeps a compiler from computing before the mode is set.
template <class T> inline T held(T x) {
    volatile T y = x;
    return y;
}

template <class T> inline T saturated(T x) {
    auto w = wide(x);
    return w != w ? narrow<T>(0.0) : narrow<T>(w < 0 ? decltype(w)(0) : w > 1 ? decltype(w)(1) : w);
}

#define BINARY(NAME, FLOAT, INTEGER)                                                                                   \
    template <class T, Rounding R = RN> inline T NAME(T a, T b) {                                                      \
        if constexpr (is_half<T>) { auto x = wide(a), y = wide(b); return narrow<T>(FLOAT); }                          \
        else if constexpr (is_float<T> && R != RN) return rounded<R>([&] { T x = held(a), y = held(b); return FLOAT; }); \
        else if constexpr (is_float<T>) { T x = a, y = b; return FLOAT; }                                              \
        else { Word<T> x = (Word<T>)a, y = (Word<T>)b; return (T)(INTEGER); }                                          \
    }
BINARY(add, x + y, x + y)
BINARY(sub, x - y, x - y)
BINARY(mul, x * y, (u64)x * (u64)y)
#undef BINARY

template <class T, Rounding R = RN> inline T div(T a, T b) {
    if constexpr (is_float<T>) return rounded<R>([&] { return held(a) / held(b); });
    else if (b == 0) return (T)-1;
    else if constexpr (std::is_signed_v<T>) return b == -1 ? (T)(0 - (Word<T>)a) : (T)(a / b);
    else return (T)(a / b);
}
template <class T> inline T rem(T a, T b) {
    if (b == 0) return a;
    if constexpr (std::is_signed_v<T>) if (b == -1) return 0;
    return (T)(a % b);
}

template <class T> struct TwiceOf;
template <> struct TwiceOf<u16> { typedef u32 type; };
template <> struct TwiceOf<s16> { typedef s32 type; };
template <> struct TwiceOf<u32> { typedef u64 type; };
template <> struct TwiceOf<s32> { typedef s64 type; };
template <> struct TwiceOf<u64> { typedef unsigned __int128 type; };
template <> struct TwiceOf<s64> { typedef __int128 type; };
template <class T> using Twice = typename TwiceOf<T>::type;
template <class T> inline Twice<T> mul_wide(T a, T b) { return (Twice<T>)a * (Twice<T>)b; }
template <class T> inline T mul_hi(T a, T b) { return (T)(mul_wide(a, b) >> (sizeof(T) * 8)); }

template <class T, Rounding R = RN> inline T fma(T a, T b, T c) {
    if constexpr (is_half<T>) return narrow<T>(std::fma(wide(a), wide(b), wide(c)));
    else if constexpr (R == RN) return std::fma(a, b, c);
    else return rounded<R>([&] { return std::fma(held(a), held(b), held(c)); });
}

template <class T> inline T neg(T a) {
    if constexpr (is_float<T>) return std::bit_cast<T>((Word<T>)(std::bit_cast<Word<T>>(a) ^ (Word<T>)1 << (sizeof(T) * 8 - 1)));
    else return (T)(0 - (Word<T>)a);
}
template <class T> inline T abs(T a) {
    if constexpr (is_float<T>) return std::bit_cast<T>((Word<T>)(std::bit_cast<Word<T>>(a) & ~((Word<T>)1 << (sizeof(T) * 8 - 1))));
    else return a < 0 ? (T)(0 - (Word<T>)a) : a;
}
// If an operand is NaN, the result is NaN with NAN_WINS, and the other operand without it.
template <class T, bool NAN_WINS> inline T min(T a, T b) {
    auto x = wide(a), y = wide(b);
    if constexpr (is_float<T>) {
        if (x != x || y != y) return NAN_WINS ? (x != x ? a : b) : (x != x ? b : a);
        if (x == y) return std::signbit(x) ? a : b;
    }
    return x < y ? a : b;
}
template <class T, bool NAN_WINS> inline T max(T a, T b) {
    auto x = wide(a), y = wide(b);
    if constexpr (is_float<T>) {
        if (x != x || y != y) return NAN_WINS ? (x != x ? a : b) : (x != x ? b : a);
        if (x == y) return std::signbit(x) ? b : a;
    }
    return x > y ? a : b;
}

template <class T> inline T copysign(T sign, T size) {
    constexpr Word<T> top = (Word<T>)1 << (sizeof(T) * 8 - 1);
    return std::bit_cast<T>((Word<T>)((std::bit_cast<Word<T>>(sign) & top) | (std::bit_cast<Word<T>>(size) & ~top)));
}

#define UNARY(NAME, F)                                                                                                 \
    template <class T, Rounding R = RN> inline T NAME(T a) { auto x = wide(a); return narrow<T>(F); }
UNARY(rcp, 1 / x)
UNARY(sqrt, std::sqrt(x))
UNARY(rsqrt, 1 / std::sqrt(x))
UNARY(ex2, std::exp2(x))
UNARY(lg2, std::log2(x))
UNARY(sin, std::sin(x))
UNARY(cos, std::cos(x))
UNARY(tanh, std::tanh(x))
#undef UNARY

template <class T> inline T shl(T a, u32 n) { return n >= sizeof(T) * 8 ? 0 : (T)(a << n); }
template <class T> inline T shr(T a, u32 n) {
    if (n >= sizeof(T) * 8) return std::is_signed_v<T> && a < 0 ? (T)-1 : 0;
    return (T)(a >> n);
}
template <class T> inline T bfi(T field, T base, u32 at, u32 length) {
    at &= 0xff;
    length &= 0xff;
    if (at >= sizeof(T) * 8 || length == 0) return base;
    T mask = (length >= sizeof(T) * 8 ? ~(T)0 : (((T)1 << length) - 1)) << at;
    return (base & ~mask) | ((field << at) & mask);
}
template <class T> inline T bfe(T a, u32 at, u32 length) {
    constexpr u32 BITS = sizeof(T) * 8;
    at &= 0xff;
    length &= 0xff;
    T result = 0;
    bool sign = std::is_signed_v<T> && length > 0 && ((Word<T>)a >> (at + length - 1 < BITS ? at + length - 1 : BITS - 1) & 1);
    for (u32 i = 0; i < BITS; i++) {
        bool bit = i < length ? (at + i < BITS ? (Word<T>)a >> (at + i) & 1 : sign) : sign;
        result = (T)((Word<T>)result | (Word<T>)bit << i);
    }
    return result;
}
inline u32 prmt(u32 a, u32 b, u32 how) {
    u64 bytes = (u64)b << 32 | a;
    u32 result = 0;
    for (int i = 0; i < 4; i++) {
        u32 pick = how >> 4 * i & 15, byte = bytes >> 8 * (pick & 7) & 0xff;
        if (pick & 8) byte = byte & 0x80 ? 0xff : 0;
        result |= byte << 8 * i;
    }
    return result;
}
template <class T> inline u32 clz(T a) { return (u32)std::countl_zero((Word<T>)a); }
template <class T> inline u32 popc(T a) { return (u32)std::popcount((Word<T>)a); }
template <class T> inline T brev(T a) {
    T result = 0;
    for (u32 i = 0; i < sizeof(T) * 8; i++) result |= (a >> i & 1) << (sizeof(T) * 8 - 1 - i);
    return result;
}

// Conversion between types. INTEGRAL: to a whole number in this direction, also within the same
// type.
enum Whole { NOT_WHOLE, RNI, RZI, RMI, RPI };
template <Whole W, class F> inline F whole(F x) {
    if constexpr (W == RNI) return std::nearbyint(x);
    if constexpr (W == RZI) return std::trunc(x);
    if constexpr (W == RMI) return std::floor(x);
    if constexpr (W == RPI) return std::ceil(x);
    return x;
}
template <class To, class From, Whole W, Rounding R, bool SATURATE> inline To cvt(From from) {
    if constexpr (is_float<From> && !is_float<To>) {
        auto x = whole<W>(wide(from));
        if (x != x) return sizeof(To) == 8 ? (To)((u64)1 << 63) : 0;
        // In f80, which holds every limit.
        long double y = x;
        if (y < (long double)std::numeric_limits<To>::min()) return std::numeric_limits<To>::min();
        if (y > (long double)std::numeric_limits<To>::max()) return std::numeric_limits<To>::max();
        return (To)x;
    } else if constexpr (is_float<To>) {
        To to;
        if constexpr (std::is_same_v<To, From>) to = narrow<To>(whole<W>(wide(from)));
        else if constexpr (is_half<To>) {
            static_assert(R == RN || !is_float<From>);
            to = narrow<To>((double)wide(from));
        } else if constexpr (is_half<From>) to = (To)wide(from);
        else to = rounded<R>([&] { return (To)held(from); });
        if constexpr (SATURATE) return saturated(to);
        return to;
    } else if constexpr (SATURATE) {
        if (std::cmp_less(from, std::numeric_limits<To>::min())) return std::numeric_limits<To>::min();
        if (std::cmp_greater(from, std::numeric_limits<To>::max())) return std::numeric_limits<To>::max();
        return (To)from;
    } else return (To)from;
}
template <class T> inline u32 cvt_pair(f32 high, f32 low) {
    T a, b;
    store(a, high);
    store(b, low);
    return (u32)a.bits << 16 | b.bits;
}

// Applied to each half of words that hold two numbers.
template <class T, class F, class... A> inline u32 halves(F f, A... words) {
    T low = f(get<T>((u16)words)...), high = f(get<T>((u16)(words >> 16))...);
    return (u32)high.bits << 16 | low.bits;
}

#define COMPARE(NAME, EXPR)                                                                                            \
    template <class T> inline bool NAME(T a, T b) { auto x = wide(a), y = wide(b); return EXPR; }
COMPARE(eq, x == y)
COMPARE(ne, x != y && !(x != x) && !(y != y))
COMPARE(lt, x < y)
COMPARE(le, x <= y)
COMPARE(gt, x > y)
COMPARE(ge, x >= y)
COMPARE(equ, !(x != y) || x != x || y != y)
COMPARE(neu, x != y)
COMPARE(ltu, !(x >= y))
COMPARE(leu, !(x > y))
COMPARE(gtu, !(x <= y))
COMPARE(geu, !(x < y))
COMPARE(num, x == x && y == y)
COMPARE(nan, x != x || y != y)
#undef COMPARE

// With a carry in and out.
template <class T> inline T add_carry(T a, T b, bool carry, bool &out) {
    T half, sum;
    bool first = __builtin_add_overflow(a, b, &half), second = __builtin_add_overflow(half, (T)carry, &sum);
    out = first || second;
    return sum;
}
template <class T> inline T sub_borrow(T a, T b, bool borrow, bool &out) {
    T half, rest;
    bool first = __builtin_sub_overflow(a, b, &half), second = __builtin_sub_overflow(half, (T)borrow, &rest);
    out = first || second;
    return rest;
}
template <bool LEFT, bool WRAP> inline u32 funnel(u32 low, u32 high, u32 by) {
    u32 n = WRAP ? by & 31 : by > 32 ? 32 : by;
    u64 both = (u64)high << 32 | low;
    return LEFT ? (u32)(both << n >> 32) : (u32)(both >> n);
}
inline u32 lop3(u32 a, u32 b, u32 c, u32 table) {
    u32 result = 0;
    for (u32 i = 0; i < 8; i++) {
        if (table >> i & 1) result |= (i & 4 ? a : ~a) & (i & 2 ? b : ~b) & (i & 1 ? c : ~c);
    }
    return result;
}
template <class T> inline T truth(bool is_true) {
    if constexpr (is_float<T>) return narrow<T>(is_true ? 1.0 : 0.0);
    else return is_true ? (T)-1 : 0;
}

// Memory. A device refuses misaligned addresses, and its kernels cannot reach the host's memory.
// Unallocated memory is not mapped.
extern u64 device_start, device_end;
[[noreturn]] void fault(const char *what, u64 address);
inline u64 of_device(u64 address) {
    if (address < device_start || address >= device_end) fault("an address that is not of this device", address);
    return address;
}
inline void aligned(u64 address, u64 bytes) {
    if (address % bytes != 0) fault("a misaligned address", address);
    if (address < 4096) fault("an illegal address", address);
}
// The address of shared memory, from the lower half that PTX has.
extern u64 shared_window;
inline u64 window(u32 address) { return shared_window | address; }
template <class T> inline T read(u64 address) {
    T value;
    memcpy(&value, (const void *)address, sizeof value);
    return value;
}
template <class T> inline void write(u64 address, T value) { memcpy((void *)address, &value, sizeof value); }

// Atomic operations: threads take turns.
template <class T, class F> inline T change(u64 address, F f) {
    aligned(address, sizeof(T));
    T old = read<T>(address);
    write<T>(address, f(old));
    return old;
}

enum Shuffle { UP, DOWN, BFLY, IDX };
template <Shuffle HOW> inline u32 shuffle(u32 value, u32 by, u32 limits, bool &valid) {
    shim::publish(&value, 1);
    u32 lane = shim::lane(), segment = limits >> 8 & 31, most = (lane & segment) | (limits & 31 & ~segment);
    u32 from = lane;
    by &= 31;
    if constexpr (HOW == UP) from = lane - by, valid = (s32)from >= (s32)most;
    if constexpr (HOW == DOWN) from = lane + by, valid = from <= most;
    if constexpr (HOW == BFLY) from = lane ^ by, valid = from <= most;
    if constexpr (HOW == IDX) from = (lane & segment) | (by & ~segment), valid = from <= most;
    return *shim::published(valid ? from : lane);
}
inline u32 ballot(bool is_true) {
    u32 own = is_true, all = 0;
    shim::publish(&own, 1);
    for (u32 i = 0; i < 32; i++) all |= *shim::published(i) << i;
    return all;
}
// Copies to shared memory: the first `there` bytes are copied, the others are zeros.
inline void copy_some(u64 to, u64 from, u32 bytes, u32 there) {
    aligned(to, bytes);
    if (there != 0 && there != bytes) fault("a copy of a part", from);
    if (there) aligned(of_device(from), bytes);
    shim::begin_copy((void *)to, there ? (const void *)from : nullptr, bytes);
}
} // namespace ptx
