// What `processor.hpp` declares.
//
// Source: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 1, sections 14.3 and 15.2.
#include "processor.hpp"

#ifdef SYNCLINE_ON_X86_64
#include <cpuid.h>
#endif

namespace syncline {

namespace {

#ifdef SYNCLINE_ON_X86_64

struct Leaf {
    unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
};

Leaf leaf_of(unsigned number) {
    Leaf leaf;
    __get_cpuid_count(number, 0, &leaf.eax, &leaf.ebx, &leaf.ecx, &leaf.edx);
    return leaf;
}

// Return whether the operating system keeps all registers of a mask when it switches processes.
bool keeps_registers(const Leaf& basic, unsigned mask) {
    if (!(basic.ecx & bit_OSXSAVE)) return false;
    unsigned low, high;
    asm("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return (low & mask) == mask;
}

InstructionSets ask() {
    constexpr unsigned OF_256_BITS = 0x06, OF_512_BITS = 0xE6;
    const Leaf basic = leaf_of(1), extended = leaf_of(7);
    const bool keeps_256 = keeps_registers(basic, OF_256_BITS), keeps_512 = keeps_registers(basic, OF_512_BITS);
    InstructionSets sets;
    sets.aes = basic.ecx & bit_AES;
    sets.crc32_folding = basic.ecx & bit_PCLMUL && basic.ecx & bit_SSE4_1;
    sets.wide_crc32_folding =
        sets.crc32_folding && keeps_512 && extended.ebx & bit_AVX512F && extended.ecx & bit_VPCLMULQDQ;
    sets.avx2 = keeps_256 && extended.ebx & bit_AVX2;
    sets.f16c = keeps_256 && basic.ecx & bit_F16C;
    return sets;
}

#else

InstructionSets ask() { return {}; }

#endif

}  // namespace

const InstructionSets& instruction_sets() {
    static const InstructionSets sets = ask();
    return sets;
}

}  // namespace syncline
