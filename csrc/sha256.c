/* SHA-256 (FIPS 180-4), for many short inputs at once.
 *
 * Why not only hashlib: checking a ledger's chain means one hash a line, a
 * million lines; from Python each costs an object and a call many times as
 * long as its hashing. Here one call takes the whole buffer with its spans.
 *
 * Three compress functions, one for each way to run the rounds; everything
 * else (padding, lengths, pieces) stands once and takes the function as an
 * argument (H2). Which one the CPU can run is asked at run time, so one wheel
 * serves old and new machines.
 *
 * Not done: two interleaved streams (a ledger's lines are written by then and
 * the disk is slower than one), and AVX2 (where it is new enough to matter,
 * SHA-NI is there too).
 */
#include "effectfence.h"

#include <stdatomic.h>
#include <string.h>

#define BLOCK 64
#define DIGEST 32

/* SHA-NI: gcc and clang compile a function for more than the file's target. */
#if (defined(__x86_64__) || defined(__i386__)) && (defined(__GNUC__) || defined(__clang__))
#define HAVE_SHA_NI 1
#include <cpuid.h>
#include <immintrin.h>
#else
#define HAVE_SHA_NI 0
#endif

/* arm64: little endian only, and a compiler that offers the instructions beyond
 * the file's target (clang does from 16; Apple's target has them anyway). */
#if defined(__aarch64__) && defined(__GNUC__) && !defined(__AARCH64EB__) &&          \
    (defined(__APPLE__) || defined(__linux__)) &&                                    \
    (!defined(__clang__) || defined(__ARM_FEATURE_SHA2) || __clang_major__ >= 16)
#define HAVE_ARM64 1
#include <arm_neon.h>
#if defined(__linux__)
#include <sys/auxv.h>
#endif
#else
#define HAVE_ARM64 0
#endif

/* Runs `count` whole blocks at `data` through the state. */
typedef void (*compress_function)(uint32_t state[8], const uint8_t *data, size_t count);

static compress_function compress_of(int32_t implementation);
static int32_t ask_cpu(void);

/* ---- One hash, fed piece by piece ------------------------------------------ */

struct hash {
    uint32_t state[8];
    uint64_t length;        /* bytes fed so far */
    uint8_t pending[BLOCK]; /* the length % 64 bytes that fill no block yet */
    compress_function compress;
};

static void start(struct hash *hash, compress_function compress) {
    /* FIPS 180-4, 5.3.3: the fractional parts of the first eight primes' roots. */
    static const uint32_t initial[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                        0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
    memcpy(hash->state, initial, sizeof initial);
    hash->length = 0;
    hash->compress = compress;
}

static void feed(struct hash *hash, const uint8_t *data, uint64_t length) {
    if (length == 0) /* `data` may be NULL then, which memcpy does not allow */
        return;
    size_t held = (size_t)(hash->length % BLOCK);
    hash->length += length;
    if (held) {
        size_t taken = length < BLOCK - held ? (size_t)length : BLOCK - held;
        memcpy(hash->pending + held, data, taken);
        if (held + taken < BLOCK)
            return;
        hash->compress(hash->state, hash->pending, 1);
        data += taken;
        length -= taken;
    }
    size_t blocks = (size_t)(length / BLOCK);
    if (blocks)
        hash->compress(hash->state, data, blocks);
    memcpy(hash->pending, data + blocks * BLOCK, (size_t)(length % BLOCK));
}

/* FIPS 180-4, 5.1.1: a one bit, zeros, the length in bits as 64-bit big endian. */
static void finish(struct hash *hash, uint8_t *digest) {
    uint8_t last[2 * BLOCK] = {0};
    size_t held = (size_t)(hash->length % BLOCK);
    size_t blocks = held < BLOCK - 8 ? 1 : 2;
    uint64_t bits = hash->length * 8; /* wraps as the standard's 2^64-1 bits end */
    memcpy(last, hash->pending, held);
    last[held] = 0x80;
    for (size_t byte = 0; byte < 8; byte++)
        last[blocks * BLOCK - 1 - byte] = (uint8_t)(bits >> (8 * byte));
    hash->compress(hash->state, last, blocks);
    for (size_t byte = 0; byte < DIGEST; byte++)
        digest[byte] = (uint8_t)(hash->state[byte / 4] >> (24 - 8 * (byte % 4)));
}

int32_t ef_sha256(int32_t implementation, const uint8_t *const *pieces,
                  const uint64_t *lengths, uint64_t count, uint8_t *digest) {
    compress_function compress = compress_of(implementation);
    if (compress == NULL)
        return EF_NOT_HERE;
    struct hash hash;
    start(&hash, compress);
    for (uint64_t piece = 0; piece < count; piece++)
        feed(&hash, pieces[piece], lengths[piece]);
    finish(&hash, digest);
    return EF_OK;
}

struct ef_answer ef_sha256_spans(int32_t implementation, const uint8_t *data, uint64_t size,
                                 const uint64_t *starts, const uint64_t *ends,
                                 uint64_t count, uint8_t *digests) {
    compress_function compress = compress_of(implementation);
    if (compress == NULL)
        return (struct ef_answer){EF_NOT_HERE, 0};
#ifdef EFFECTFENCE_PLANT_OVERFLOW /* only for the test that AddressSanitizer would notice */
    size += 1;
#endif
    for (uint64_t span = 0; span < count; span++)
        if (starts[span] > ends[span] || ends[span] > size)
            return (struct ef_answer){EF_BAD_SPAN, span};
    for (uint64_t span = 0; span < count; span++) {
        struct hash hash;
        start(&hash, compress);
        feed(&hash, data + starts[span], ends[span] - starts[span]);
        finish(&hash, digests + DIGEST * span);
    }
    return (struct ef_answer){EF_OK, count};
}

/* ---- The rounds, three ways ------------------------------------------------- */

/* FIPS 180-4, 4.2.2. Aligned: the vector implementations load four at a time. */
static const uint32_t K[64] __attribute__((aligned(16))) = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

static uint32_t rotate_right(uint32_t value, unsigned bits) {
    return value >> bits | value << (32 - bits);
}

static uint32_t big_endian(const uint8_t *bytes) {
#ifdef EFFECTFENCE_PLANT_UB /* only for the test that UBSan would notice */
    return (uint32_t)(bytes[0] << 24 | bytes[1] << 16 | bytes[2] << 8 | bytes[3]);
#else
    return (uint32_t)bytes[0] << 24 | (uint32_t)bytes[1] << 16 | (uint32_t)bytes[2] << 8 | bytes[3];
#endif
}

/* FIPS 180-4, 6.2.2, with the names of the standard. */
static void compress_portable(uint32_t state[8], const uint8_t *data, size_t count) {
    for (; count; count--, data += BLOCK) {
        uint32_t w[64];
        for (int t = 0; t < 16; t++)
            w[t] = big_endian(data + 4 * t);
        for (int t = 16; t < 64; t++) {
            uint32_t s0 = rotate_right(w[t - 15], 7) ^ rotate_right(w[t - 15], 18) ^ w[t - 15] >> 3;
            uint32_t s1 = rotate_right(w[t - 2], 17) ^ rotate_right(w[t - 2], 19) ^ w[t - 2] >> 10;
            w[t] = w[t - 16] + s0 + w[t - 7] + s1;
        }
        uint32_t a = state[0], b = state[1], c = state[2], d = state[3];
        uint32_t e = state[4], f = state[5], g = state[6], h = state[7];
        for (int t = 0; t < 64; t++) {
            uint32_t S1 = rotate_right(e, 6) ^ rotate_right(e, 11) ^ rotate_right(e, 25);
            uint32_t T1 = h + S1 + ((e & f) ^ (~e & g)) + K[t] + w[t];
            uint32_t S0 = rotate_right(a, 2) ^ rotate_right(a, 13) ^ rotate_right(a, 22);
            uint32_t T2 = S0 + ((a & b) ^ (a & c) ^ (b & c));
            h = g, g = f, f = e, e = d + T1, d = c, c = b, b = a, a = T1 + T2;
        }
        state[0] += a, state[1] += b, state[2] += c, state[3] += d;
        state[4] += e, state[5] += f, state[6] += g, state[7] += h;
    }
}

#if HAVE_SHA_NI
/* The instructions keep the state as ABEF and CDGH (Intel SDM, SHA256RNDS2)
 * and do two rounds each. Sixteen groups of four rounds; from the fourth group
 * on the message schedule is made four words at a time, in a ring of four. */
__attribute__((target("sha,ssse3,sse4.1")))
static void compress_sha_ni(uint32_t state[8], const uint8_t *data, size_t count) {
    const __m128i swap = _mm_set_epi64x(0x0c0d0e0f08090a0b, 0x0405060700010203);
    __m128i dcba = _mm_loadu_si128((const __m128i *)state);
    __m128i hgfe = _mm_loadu_si128((const __m128i *)(state + 4));
    __m128i cdab = _mm_shuffle_epi32(dcba, 0xb1);
    __m128i efgh = _mm_shuffle_epi32(hgfe, 0x1b);
    __m128i abef = _mm_alignr_epi8(cdab, efgh, 8);
    __m128i cdgh = _mm_blend_epi16(efgh, cdab, 0xf0);

    for (; count; count--, data += BLOCK) {
        const __m128i abef_before = abef, cdgh_before = cdgh;
        __m128i w[4];
        for (int group = 0; group < 4; group++)
            w[group] = _mm_shuffle_epi8(
                _mm_loadu_si128((const __m128i *)(data + 16 * group)), swap);
#pragma GCC unroll 16
        for (int group = 0; group < 16; group++) {
            __m128i now = w[group % 4];
            __m128i sum = _mm_add_epi32(now, _mm_load_si128((const __m128i *)(K + 4 * group)));
            cdgh = _mm_sha256rnds2_epu32(cdgh, abef, sum);
            abef = _mm_sha256rnds2_epu32(abef, cdgh, _mm_shuffle_epi32(sum, 0x0e));
            if (group < 12) { /* w[t+16 ..] from w[t ..], w[t+4 ..], w[t+8 ..], w[t+12 ..] */
                __m128i last = w[(group + 3) % 4];
                __m128i seven_back = _mm_alignr_epi8(last, w[(group + 2) % 4], 4);
                __m128i part = _mm_sha256msg1_epu32(now, w[(group + 1) % 4]);
                w[group % 4] = _mm_sha256msg2_epu32(_mm_add_epi32(part, seven_back), last);
            }
        }
        abef = _mm_add_epi32(abef, abef_before);
        cdgh = _mm_add_epi32(cdgh, cdgh_before);
    }

    __m128i feba = _mm_shuffle_epi32(abef, 0x1b);
    __m128i dchg = _mm_shuffle_epi32(cdgh, 0xb1);
    _mm_storeu_si128((__m128i *)state, _mm_blend_epi16(feba, dchg, 0xf0));
    _mm_storeu_si128((__m128i *)(state + 4), _mm_alignr_epi8(dchg, feba, 8));
}

/* CPUID leaf 7 EBX bit 29: SHA. Leaf 1 ECX bit 9: SSSE3, bit 19: SSE4.1. */
static int32_t ask_cpu(void) {
    unsigned eax, ebx, ecx, edx;
    if (!__get_cpuid(1, &eax, &ebx, &ecx, &edx) || !(ecx & 1u << 9) || !(ecx & 1u << 19))
        return EF_SHA256_PORTABLE;
    if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) || !(ebx & 1u << 29))
        return EF_SHA256_PORTABLE;
    return EF_SHA256_SHA_NI;
}

#elif HAVE_ARM64
/* Four rounds an instruction pair (Arm ARM, SHA256H and SHA256H2). */
#if defined(__clang__)
__attribute__((target("sha2")))
#else
__attribute__((target("+crypto")))
#endif
static void compress_arm64(uint32_t state[8], const uint8_t *data, size_t count) {
    uint32x4_t abcd = vld1q_u32(state), efgh = vld1q_u32(state + 4);
    for (; count; count--, data += BLOCK) {
        const uint32x4_t abcd_before = abcd, efgh_before = efgh;
        uint32x4_t w[4];
        for (int group = 0; group < 4; group++)
            w[group] = vreinterpretq_u32_u8(vrev32q_u8(vld1q_u8(data + 16 * group)));
        for (int group = 0; group < 16; group++) {
            uint32x4_t now = w[group % 4], abcd_now = abcd;
            uint32x4_t sum = vaddq_u32(now, vld1q_u32(K + 4 * group));
            abcd = vsha256hq_u32(abcd, efgh, sum);
            efgh = vsha256h2q_u32(efgh, abcd_now, sum);
            if (group < 12)
                w[group % 4] = vsha256su1q_u32(vsha256su0q_u32(now, w[(group + 1) % 4]),
                                               w[(group + 2) % 4], w[(group + 3) % 4]);
        }
        abcd = vaddq_u32(abcd, abcd_before);
        efgh = vaddq_u32(efgh, efgh_before);
    }
    vst1q_u32(state, abcd);
    vst1q_u32(state + 4, efgh);
}

static int32_t ask_cpu(void) {
#if defined(__APPLE__) /* every arm64 Mac and phone has them */
    return EF_SHA256_ARM64;
#else
    const unsigned long sha2 = 1ul << 6; /* HWCAP_SHA2, the kernel's stable ABI */
    return getauxval(AT_HWCAP) & sha2 ? EF_SHA256_ARM64 : EF_SHA256_PORTABLE;
#endif
}

#else
static int32_t ask_cpu(void) {
    return EF_SHA256_PORTABLE;
}
#endif

/* ---- The choice ------------------------------------------------------------- */

int32_t ef_sha256_best(void) {
    /* Asking a virtual machine's CPU can cost 50 us, so once: 0 is "not asked
     * yet", else the answer + 1. relaxed: every thread would find the same. */
    static _Atomic int32_t known;
    int32_t found = atomic_load_explicit(&known, memory_order_relaxed);
    if (found == 0) {
        found = ask_cpu() + 1;
        atomic_store_explicit(&known, found, memory_order_relaxed);
    }
    return found - 1;
}

int32_t ef_sha256_has(int32_t implementation) {
    return implementation == EF_SHA256_PORTABLE || implementation == ef_sha256_best();
}

static compress_function compress_of(int32_t implementation) {
    if (!ef_sha256_has(implementation))
        return NULL;
#if HAVE_SHA_NI
    if (implementation == EF_SHA256_SHA_NI)
        return compress_sha_ni;
#elif HAVE_ARM64
    if (implementation == EF_SHA256_ARM64)
        return compress_arm64;
#endif
    return compress_portable;
}
