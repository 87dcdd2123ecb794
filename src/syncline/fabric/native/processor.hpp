// Which instructions this processor has beyond those of every x86-64. The processor itself is asked: where zig
// compiles, as for wheels and on machines without a compiler, `__builtin_cpu_supports` says of each that it is missing.
#pragma once

#if defined(__x86_64__) && defined(__GNUC__)
#define SYNCLINE_ON_X86_64
#include <immintrin.h>
#endif

namespace syncline {

// False also where the operating system does not keep the registers that they use. None is there elsewhere.
struct InstructionSets {
    bool aes = false;
    bool crc32_folding = false;       // PCLMULQDQ and SSE4.1
    bool wide_crc32_folding = false;  // the same with registers of 512 bits: AVX512F and VPCLMULQDQ
    bool avx2 = false;
    bool f16c = false;  // conversions of 16-bit floats
};

const InstructionSets& instruction_sets();

}  // namespace syncline
