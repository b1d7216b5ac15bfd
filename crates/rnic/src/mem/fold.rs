//! CRC32c straight over registered memory, with carry-less multiplication of 64 bytes at a time.
//!
//! The crates for it take slices, and no slice may be formed over memory that the program and its peer write meanwhile; a copy in
//! between (see [`super::crc_over`]) halves the speed. So this one loads by address, in assembler, where [`super::guard`] catches what
//! is not there. What a racing writer makes of the sum is the writer's business.
//!
//! The way is Intel's (Gopal et al., "Fast CRC Computation for Generic Polynomials Using PCLMULQDQ Instruction", 2009): four
//! accumulators of 64 bytes are multiplied by x^2048 mod P with each step of 256 bytes, then folded into one of 16 bytes, of which the
//! processor's CRC instruction takes the rest. Bit-reflected as iSCSI has it, a fold by T bits takes the lower half of each 128-bit
//! lane times x^(T+31) mod P and the upper times x^(T-33).

use core::arch::x86_64::{
    __m128i, __m512i, _mm_clmulepi64_si128, _mm_crc32_u64, _mm_cvtsi128_si64, _mm_extract_epi64,
    _mm_set_epi64x, _mm_xor_si128, _mm512_clmulepi64_epi128, _mm512_extracti32x4_epi32, _mm512_set_epi64,
    _mm512_setzero_si512, _mm512_ternarylogic_epi64,
};

/// Bytes are taken in multiples of this.
pub(super) const STEP: usize = 256;

/// Whether this processor has the instructions.
pub(super) fn available() -> bool {
    std::arch::is_x86_feature_detected!("avx512f")
        && std::arch::is_x86_feature_detected!("vpclmulqdq")
        && std::arch::is_x86_feature_detected!("pclmulqdq")
        && std::arch::is_x86_feature_detected!("sse4.2")
}

/// x^n mod P, bit-reflected.
const fn power(n: u32) -> i64 {
    const P: u64 = 0x1_1EDC_6F41;
    let mut r: u64 = 1;
    let mut i = 0;
    while i < n {
        r <<= 1;
        if r >> 32 != 0 {
            r ^= P;
        }
        i += 1;
    }
    (r as u32).reverse_bits() as i64
}

/// The two factors of a fold by so many bits.
const fn factors(bits: u32) -> (i64, i64) {
    (power(bits + 31), power(bits - 33))
}

const BY_2048: (i64, i64) = factors(2048);
const BY_512: (i64, i64) = factors(512);
const BY_128: (i64, i64) = factors(128);

// rdi: at, esi: register, rdx: length, rcx: the two factors of BY_2048, r8: where the four accumulators go, 256 bytes of ours. rax
// as that of the guarded copy.
core::arch::global_asm!(
    ".pushsection .text.uwarp_guarded_fold,\"ax\",@progbits",
    ".p2align 6",
    ".globl uwarp_guarded_fold",
    ".hidden uwarp_guarded_fold",
    ".type uwarp_guarded_fold,@function",
    "uwarp_guarded_fold:",
    ".cfi_startproc",
    "vmovd xmm4, esi",
    "vpxorq zmm0, zmm4, [rdi]",
    "vmovdqu64 zmm1, [rdi + 64]",
    "vmovdqu64 zmm2, [rdi + 128]",
    "vmovdqu64 zmm3, [rdi + 192]",
    "vbroadcasti32x4 zmm4, [rcx]",
    "lea rax, [rdi + rdx]",
    "add rdi, 256",
    "cmp rdi, rax",
    "jae 3f",
    ".p2align 5",
    "2:",
    "vpclmulqdq zmm5, zmm0, zmm4, 0x00",
    "vpclmulqdq zmm0, zmm0, zmm4, 0x11",
    "vpternlogq zmm0, zmm5, [rdi], 0x96",
    "vpclmulqdq zmm6, zmm1, zmm4, 0x00",
    "vpclmulqdq zmm1, zmm1, zmm4, 0x11",
    "vpternlogq zmm1, zmm6, [rdi + 64], 0x96",
    "vpclmulqdq zmm5, zmm2, zmm4, 0x00",
    "vpclmulqdq zmm2, zmm2, zmm4, 0x11",
    "vpternlogq zmm2, zmm5, [rdi + 128], 0x96",
    "vpclmulqdq zmm6, zmm3, zmm4, 0x00",
    "vpclmulqdq zmm3, zmm3, zmm4, 0x11",
    "vpternlogq zmm3, zmm6, [rdi + 192], 0x96",
    "add rdi, 256",
    "cmp rdi, rax",
    "jb 2b",
    "3:",
    "vmovdqu64 [r8], zmm0",
    "vmovdqu64 [r8 + 64], zmm1",
    "vmovdqu64 [r8 + 128], zmm2",
    "vmovdqu64 [r8 + 192], zmm3",
    "vzeroupper",
    "xor eax, eax",
    "ret",
    ".globl uwarp_guarded_fold_end",
    ".hidden uwarp_guarded_fold_end",
    "uwarp_guarded_fold_end:",
    ".cfi_endproc",
    ".size uwarp_guarded_fold, . - uwarp_guarded_fold",
    ".popsection",
);

unsafe extern "C" {
    fn uwarp_guarded_fold(at: *const u8, register: u32, len: usize, by: *const [i64; 2], out: *mut u8)
    -> u32;
    fn uwarp_guarded_fold_end();
}

/// The code in which a fault is the guard's, and what of the memory it touches is ours: so many bytes at r8.
pub(super) fn guarded() -> (std::ops::Range<usize>, usize) {
    (uwarp_guarded_fold as *const () as usize..uwarp_guarded_fold_end as *const () as usize, STEP)
}

/// Takes `len` bytes at `at`, a multiple of [`STEP`] and not zero, into a CRC register. `None` when they are not mapped.
///
/// # Safety
/// [`available`] is true, and the bytes are the program's: mapped and readable, or a fault at them is acceptable.
#[target_feature(enable = "avx512f,vpclmulqdq,pclmulqdq,sse4.2")]
pub(super) unsafe fn update(register: u32, at: *const u8, len: usize) -> Option<u32> {
    debug_assert!(len > 0 && len.is_multiple_of(STEP));
    let spread = |(low, high): (i64, i64)| _mm512_set_epi64(high, low, high, low, high, low, high, low);
    let mut x = [_mm512_setzero_si512(); 4];
    let by = [BY_2048.0, BY_2048.1];
    // SAFETY: `by` and `x` are of the sizes that the routine reads and writes; the rest is the caller's promise.
    if unsafe { uwarp_guarded_fold(at, register, len, &raw const by, (&raw mut x).cast()) } != 0 {
        return None;
    }
    let by = spread(BY_512);
    let x = fold(fold(fold(x[0], by, x[1]), by, x[2]), by, x[3]);
    let mut y = _mm512_extracti32x4_epi32::<0>(x);
    for lane in [
        _mm512_extracti32x4_epi32::<1>(x),
        _mm512_extracti32x4_epi32::<2>(x),
        _mm512_extracti32x4_epi32::<3>(x),
    ] {
        y = fold_one(y, lane);
    }
    let low = _mm_crc32_u64(0, _mm_cvtsi128_si64(y).cast_unsigned());
    Some((_mm_crc32_u64(low, _mm_extract_epi64::<1>(y).cast_unsigned()) & 0xFFFF_FFFF) as u32)
}

#[target_feature(enable = "avx512f,vpclmulqdq")]
fn fold(x: __m512i, by: __m512i, next: __m512i) -> __m512i {
    let low = _mm512_clmulepi64_epi128::<0x00>(x, by);
    let high = _mm512_clmulepi64_epi128::<0x11>(x, by);
    // All three exclusive-ored.
    _mm512_ternarylogic_epi64::<0x96>(low, high, next)
}

#[target_feature(enable = "pclmulqdq")]
fn fold_one(x: __m128i, next: __m128i) -> __m128i {
    let by = _mm_set_epi64x(BY_128.1, BY_128.0);
    let low = _mm_clmulepi64_si128::<0x00>(x, by);
    let high = _mm_clmulepi64_si128::<0x11>(x, by);
    _mm_xor_si128(_mm_xor_si128(low, high), next)
}

#[cfg(test)]
mod tests {
    use uwarp_wire::crc::Crc32c;

    use super::*;

    #[test]
    fn factors_are_those_of_the_paper() {
        assert_eq!(BY_128, (0xF20C_0DFE, 0x493C_7D27));
        assert_eq!(BY_512, (0x740E_EF02, 0x9E4A_DDF8));
    }

    #[test]
    fn agrees_with_the_crate_at_all_lengths_and_alignments() {
        if !available() {
            return;
        }
        let bytes: Vec<u8> = (0..40_000u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
        for (start, steps) in [(0, 1), (1, 1), (3, 2), (64, 3), (7, 5), (63, 64), (5, 100), (0, 150)] {
            let part = &bytes[start..start + steps * STEP];
            let mut whole = Crc32c::new();
            whole.update(&bytes[..start]);
            let register = whole.register();
            // SAFETY: asked above; a slice's bytes are readable.
            let register = unsafe { update(register, part.as_ptr(), part.len()) }.unwrap();
            whole.update(part);
            assert_eq!(register, whole.register(), "{start} {steps}");
            assert_eq!(Crc32c::from_register(register).finish(), whole.finish());
        }
    }
}
