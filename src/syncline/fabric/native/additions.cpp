// What `additions.hpp` declares: one loop over what a number is and what becomes of two. The compiler makes vectors of
// it, twice on x86-64: for every processor, and for those with AVX2 and conversions of halves. In the processor's
// caches it combines 26 to 34 GB/s of most types, 10 to 23 GB/s of 16-bit floats (AMD EPYC), and messages come at 3.
#include "additions.hpp"

#include <bit>
#include <cstring>
#include <type_traits>
#include <unordered_map>

#include "processor.hpp"

namespace syncline {

namespace {

// --- what a number is ---

template <typename Type>
struct Number {
    using Stored = Type;
    using Value = Type;
    static Value read(Stored stored) { return stored; }
    static Stored write(Value value) { return value; }
};

// The upper half of a float.
struct BFloat16 {
    using Stored = uint16_t;
    using Value = float;
    static Value read(Stored stored) { return upper(uint32_t{stored} << 16); }
    static Stored write(Value value) { return static_cast<Stored>(rounded(value) >> 16); }

    static float upper(uint32_t bits) { return std::bit_cast<float>(bits & 0xFFFF0000); }
    static uint32_t rounded(float value) {
        const auto bits = std::bit_cast<uint32_t>(value);
        return value == value ? (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000 : 0x7FC00000;
    }
};

// Both ways without a branch, for processors that have no instruction for it (M. Dukhan's FP16): what is subnormal is
// added to, or subtracted from, a power of two, where the processor rounds it.
struct Float16 {
    using Stored = uint16_t;
    using Value = float;
    static Value read(Stored stored) {
        const uint32_t twice = uint32_t{stored} << 17;  // without the sign
        const float normal = std::bit_cast<float>((twice >> 4) + 0x70000000) * 0x1p-112F;
        const float subnormal = std::bit_cast<float>((twice >> 17) | 0x3F000000) - 0.5F;
        const uint32_t sign = (uint32_t{stored} & 0x8000) << 16;
        return std::bit_cast<float>(sign | std::bit_cast<uint32_t>(twice < 0x08000000 ? subnormal : normal));
    }
    static Stored write(Value value) {
        const auto bits = std::bit_cast<uint32_t>(value);
        const uint32_t twice = bits << 1;
        const float magnitude = std::bit_cast<float>(bits & 0x7FFFFFFF) * 0x1p+112F * 0x1p-110F;
        const uint32_t exponent = (twice & 0xFF000000) < 0x71000000 ? 0x71000000 : twice & 0xFF000000;
        const auto rounded = std::bit_cast<uint32_t>(std::bit_cast<float>((exponent >> 1) + 0x07800000) + magnitude);
        const uint32_t number = ((rounded >> 13) & 0x7C00) + (rounded & 0x0FFF);
        return static_cast<Stored>(((bits >> 16) & 0x8000) | (twice > 0xFF000000 ? 0x7E00 : number));
    }
};

struct Bool {
    using Stored = uint8_t;
    using Value = uint8_t;
    static Value read(Stored stored) { return stored != 0; }
    static Stored write(Value value) { return value; }
};

template <typename Type>
struct Complex {
    Type real, imaginary;
};

// --- what becomes of two ---

struct Sum {
    template <typename Value>
    static Value of(Value first, Value second) {
        return static_cast<Value>(first + second);
    }
};

struct Product {
    template <typename Value>
    static Value of(Value first, Value second) {
        if constexpr (std::is_integral_v<Value>)  // not as int, to which the product of two of 16 bits does not fit
            return static_cast<Value>(uint64_t{first} * second);
        else
            return first * second;
    }
    template <typename Type>
    static Complex<Type> of(Complex<Type> first, Complex<Type> second) {
        return {first.real * second.real - first.imaginary * second.imaginary,
                first.real * second.imaginary + first.imaginary * second.real};
    }
};

struct Largest {
    template <typename Value>
    static Value of(Value first, Value second) {
        return first > second || first != first ? first : second;
    }
};

struct Smallest {
    template <typename Value>
    static Value of(Value first, Value second) {
        return first < second || first != first ? first : second;
    }
};

struct And {
    static uint8_t of(uint8_t first, uint8_t second) { return first & second; }
};

struct Or {
    static uint8_t of(uint8_t first, uint8_t second) { return first | second; }
};

struct Xor {
    static uint8_t of(uint8_t first, uint8_t second) { return first ^ second; }
};

// --- the loop ---

// Two at a time, in the words in which they lie: that takes half the time of making each of them a word.
template <typename Op>
[[gnu::always_inline]] inline size_t combine_pairs(uint8_t* into, const uint8_t* other, size_t num_bytes) {
    size_t done = 0;
    for (; done + 4 <= num_bytes; done += 4) {
        uint32_t first = 0, second = 0;
        std::memcpy(&first, into + done, 4);
        std::memcpy(&second, other + done, 4);
        const float low = Op::of(BFloat16::upper(first << 16), BFloat16::upper(second << 16));
        const float high = Op::of(BFloat16::upper(first), BFloat16::upper(second));
        const uint32_t result = BFloat16::rounded(low) >> 16 | BFloat16::rounded(high);
        std::memcpy(into + done, &result, 4);
    }
    return done;
}

template <typename Kind, typename Op>
[[gnu::always_inline]] inline void combine(uint8_t* into, const uint8_t* other, size_t num_bytes) {
    using Stored = typename Kind::Stored;
    if constexpr (std::is_same_v<Kind, BFloat16>) {
        const size_t done = combine_pairs<Op>(into, other, num_bytes);
        into += done;
        other += done;
        num_bytes -= done;
    }
    auto* results = reinterpret_cast<Stored*>(into);
    const auto* others = reinterpret_cast<const Stored*>(other);
    for (size_t place = 0; place < num_bytes / sizeof(Stored); ++place)
        results[place] = Kind::write(Op::of(Kind::read(results[place]), Kind::read(others[place])));
}

template <typename Kind, typename Op>
void combine_anywhere(uint8_t* into, const uint8_t* other, size_t num_bytes) {
    combine<Kind, Op>(into, other, num_bytes);
}

#ifdef SYNCLINE_ON_X86_64

#define SYNCLINE_WITH_AVX2 [[gnu::target("avx2,f16c")]]

template <typename Kind, typename Op>
SYNCLINE_WITH_AVX2 void combine_with_avx2(uint8_t* into, const uint8_t* other, size_t num_bytes) {
    combine<Kind, Op>(into, other, num_bytes);
}

SYNCLINE_WITH_AVX2 inline __m256 either(__m256 first, __m256 is_first, __m256 second) {
    const __m256 is_nan = _mm256_cmp_ps(first, first, _CMP_UNORD_Q);
    return _mm256_blendv_ps(second, first, _mm256_or_ps(is_first, is_nan));
}

template <typename Op>
SYNCLINE_WITH_AVX2 inline __m256 of_eight(__m256 first, __m256 second) {
    if constexpr (std::is_same_v<Op, Sum>) return _mm256_add_ps(first, second);
    if constexpr (std::is_same_v<Op, Product>) return _mm256_mul_ps(first, second);
    if constexpr (std::is_same_v<Op, Largest>) return either(first, _mm256_cmp_ps(first, second, _CMP_GT_OQ), second);
    if constexpr (std::is_same_v<Op, Smallest>) return either(first, _mm256_cmp_ps(first, second, _CMP_LT_OQ), second);
}

template <typename Op>
SYNCLINE_WITH_AVX2 inline void combine_eight_halves(uint8_t* into, const uint8_t* other) {
    const __m256 first = _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(into)));
    const __m256 second = _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(other)));
    const __m128i result = _mm256_cvtps_ph(of_eight<Op>(first, second), _MM_FROUND_TO_NEAREST_INT);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(into), result);
}

template <typename Op>
SYNCLINE_WITH_AVX2 void combine_halves_with_f16c(uint8_t* into, const uint8_t* other, size_t num_bytes) {
    for (; num_bytes >= 16; into += 16, other += 16, num_bytes -= 16) combine_eight_halves<Op>(into, other);
    uint8_t rest[16] = {}, others[16] = {};
    std::memcpy(rest, into, num_bytes);
    std::memcpy(others, other, num_bytes);
    combine_eight_halves<Op>(rest, others);
    std::memcpy(into, rest, num_bytes);
}

template <typename Kind, typename Op>
Addition choose() {
    if (!instruction_sets().avx2 || !instruction_sets().f16c) return combine_anywhere<Kind, Op>;
    if constexpr (std::is_same_v<Kind, Float16>)
        return combine_halves_with_f16c<Op>;
    else
        return combine_with_avx2<Kind, Op>;
}

#else

template <typename Kind, typename Op>
Addition choose() {
    return combine_anywhere<Kind, Op>;
}

#endif

// --- what there is ---

using Additions = std::unordered_map<std::string, Addition>;

template <typename Kind>
Additions of_floats() {
    return {{"sum", choose<Kind, Sum>()},
            {"product", choose<Kind, Product>()},
            {"max", choose<Kind, Largest>()},
            {"min", choose<Kind, Smallest>()}};
}

// Where they wrap around, signed and unsigned integers have the same bits.
template <typename Integer>
Additions of_integers() {
    using Unsigned = Number<std::make_unsigned_t<Integer>>;
    return {{"sum", choose<Unsigned, Sum>()},
            {"product", choose<Unsigned, Product>()},
            {"max", choose<Number<Integer>, Largest>()},
            {"min", choose<Number<Integer>, Smallest>()},
            {"band", choose<Number<uint8_t>, And>()},
            {"bor", choose<Number<uint8_t>, Or>()},
            {"bxor", choose<Number<uint8_t>, Xor>()}};
}

template <typename Type>
Additions of_complex() {
    return {{"sum", choose<Number<Type>, Sum>()}, {"product", choose<Number<Complex<Type>>, Product>()}};
}

Additions of_bools() {
    return {{"product", choose<Bool, And>()}, {"max", choose<Bool, Or>()}, {"min", choose<Bool, And>()},
            {"band", choose<Bool, And>()},    {"bor", choose<Bool, Or>()}, {"bxor", choose<Bool, Xor>()}};
}

}  // namespace

Addition addition_of(const std::string& dtype, const std::string& op) {
    static const std::unordered_map<std::string, Additions> known = {{"float64", of_floats<Number<double>>()},
                                                                     {"float32", of_floats<Number<float>>()},
                                                                     {"float16", of_floats<Float16>()},
                                                                     {"bfloat16", of_floats<BFloat16>()},
                                                                     {"int64", of_integers<int64_t>()},
                                                                     {"int32", of_integers<int32_t>()},
                                                                     {"int16", of_integers<int16_t>()},
                                                                     {"int8", of_integers<int8_t>()},
                                                                     {"uint64", of_integers<uint64_t>()},
                                                                     {"uint32", of_integers<uint32_t>()},
                                                                     {"uint16", of_integers<uint16_t>()},
                                                                     {"uint8", of_integers<uint8_t>()},
                                                                     {"complex128", of_complex<double>()},
                                                                     {"complex64", of_complex<float>()},
                                                                     {"bool", of_bools()}};
    const auto additions = known.find(dtype);
    if (additions == known.end()) return nullptr;
    const auto found = additions->second.find(op);
    return found == additions->second.end() ? nullptr : found->second;
}

}  // namespace syncline
