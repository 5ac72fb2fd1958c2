/* The C core: sequence words and SHA-256.
 *
 * What it owns: the numbers that domains count with, and the hashing of many
 * ledger lines in one call. What it knows of the protocol: nothing.
 *
 * Invariants, named where the code keeps them:
 *
 *   W1  A word never moves and never goes away while its arena lives; its
 *       index never names another word.
 *   W2  Nobody sees a word before its first value: an index that allocate has
 *       not finished with is refused, wherever the caller got it from.
 *   W3  Every operation on a word is one atomic step, and all operations on
 *       all words stand in one order that every thread agrees on and that
 *       respects real time (C11 memory_order_seq_cst). A read set compares
 *       words of several domains; without this, two threads could each see
 *       the other's domain as the older one.
 *   W4  No operation waits for another thread. A thread that is stopped in
 *       the middle of any of them holds up nobody.
 *   W5  A word never wraps: an addition that would pass 2^64-1 is refused and
 *       changes nothing, so a number is never issued twice.
 *   W6  A refusal (any status but EF_OK) has changed nothing.
 *   H1  No input makes a hash function read outside the bytes it was given.
 *   H2  Every implementation of SHA-256 gives the same digests.
 *
 * Nothing here takes a lock, keeps thread-local state, knows Python or needs
 * its global lock. The only global is what the CPU was found to be able to do.
 *
 * The part between the two marks is the one declaration list: the compiler
 * reads it here, cffi reads it through build.py. It keeps to what cffi can
 * parse: no preprocessor lines.
 */
#ifndef EFFECTFENCE_H
#define EFFECTFENCE_H

#include <stddef.h>
#include <stdint.h>

/* cffi: begin */

enum ef_status {
    EF_OK = 0,
    EF_NO_SUCH_WORD = 1,  /* the index was never allocated */
    EF_TOO_LARGE = 2,     /* the sum passes 2^64-1 */
    EF_NO_MEMORY = 3,     /* the system gives no more, or the arena is at its end */
    EF_BAD_SPAN = 4,      /* a span ends before it starts, or past the buffer */
    EF_NOT_HERE = 5       /* this CPU lacks the instructions asked for */
};

/* An answer: `value` means what the function says when status is EF_OK. */
struct ef_answer {
    int32_t status;
    uint64_t value;
};

typedef struct ef_words ef_words;

/* A new arena without words, or NULL when there is no memory.
 * Any number of threads may use it at once. */
ef_words *ef_words_new(void);

/* Gives the arena back. NULL is allowed. The caller vouches that no other
 * thread is inside a function with this arena and none will enter one. */
void ef_words_free(ef_words *words);

/* How many words have been allocated; counts those still getting their first
 * value. Never shrinks. */
uint64_t ef_words_length(const ef_words *words);

/* Allocates a word that holds `value`; answers its index. Indexes are given
 * out without gaps from 0. EF_NO_MEMORY leaves the arena as it was. */
struct ef_answer ef_words_allocate(ef_words *words, uint64_t value);

/* The word's value. EF_NO_SUCH_WORD for an index not allocated. */
struct ef_answer ef_words_load(const ef_words *words, uint64_t index);

/* Writes `desired` if the word holds `expected`; answers what the word held.
 * An answer equal to `expected` means that it was written, by this caller
 * alone. EF_NO_SUCH_WORD for an index not allocated. */
struct ef_answer ef_words_compare_exchange(ef_words *words, uint64_t index,
                                           uint64_t expected, uint64_t desired);

/* Adds `amount`; answers what the word held before. EF_TOO_LARGE when the sum
 * would pass 2^64-1, EF_NO_SUCH_WORD for an index not allocated. */
struct ef_answer ef_words_fetch_add(ef_words *words, uint64_t index, uint64_t amount);

enum ef_sha256_implementation {
    EF_SHA256_PORTABLE = 0,  /* plain C11, everywhere */
    EF_SHA256_SHA_NI = 1,    /* x86: SHA extensions with SSSE3 and SSE4.1 */
    EF_SHA256_ARM64 = 2      /* arm64: the SHA2 instructions */
};

/* The fastest implementation that this CPU has. Asks the CPU once. */
int32_t ef_sha256_best(void);

/* 1 if this build and this CPU have the implementation, else 0. */
int32_t ef_sha256_has(int32_t implementation);

/* SHA-256 (FIPS 180-4) of `count` pieces one after the other, into the 32
 * bytes at `digest`. A piece of length 0 is never looked at. EF_NOT_HERE when
 * the CPU lacks the implementation. */
int32_t ef_sha256(int32_t implementation, const uint8_t *const *pieces,
                  const uint64_t *lengths, uint64_t count, uint8_t *digest);

/* SHA-256 of each span [starts[i], ends[i]) of the `size` bytes at `data`;
 * digest i goes to the 32 bytes at digests + 32 i. Spans may overlap and be
 * empty. All spans are looked at before any is hashed: EF_BAD_SPAN answers
 * the first bad one's number and writes no digest. EF_NOT_HERE as above. */
struct ef_answer ef_sha256_spans(int32_t implementation, const uint8_t *data, uint64_t size,
                                 const uint64_t *starts, const uint64_t *ends,
                                 uint64_t count, uint8_t *digests);

/* cffi: end */

#endif
