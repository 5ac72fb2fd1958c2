/* Sequence words: an arena of atomic 64-bit counters that grows without moving one.
 *
 * Shape. A directory of fixed size points to chunks; chunk k holds 64 * 2^k
 * words, so 40 entries are enough for any memory there will be, an index finds
 * its word with a few shifts, and growing means adding a chunk (W1): nothing
 * is copied, nothing needs reclaiming while others read it.
 *
 *     directory   [0] -> chunk of   64 words: 0 .. 63
 *                 [1] -> chunk of  128 words: 64 .. 191
 *                 [2] -> chunk of  256 words: 192 .. 447
 *                 ...    NULL until the first word of that chunk is asked for
 *
 * A word's birth, in this order:
 *
 *     chunk there  ->  index claimed  ->  first value stored  ->  born bit set
 *      (CAS, or        (CAS on the         (nobody else may        (release)
 *       the other's)    length)             look yet, W2)
 *
 * The chunk comes before the claim so that running out of memory leaves no
 * hole (W6). The born bit is why nobody has to wait for the thread before it
 * (W4): a length that only counts finished words would have to be advanced in
 * order, and a stopped thread would stop all that come after it.
 *
 * Not done: padding words to a cache line each. Callers come from Python, one
 * call costs more than the line's journey; 8 times the memory buys nothing.
 */
#include "effectfence.h"

#include <stdatomic.h>
#include <stdlib.h>

#define FIRST_CHUNK_WORDS UINT64_C(64)
#define DIRECTORY_SIZE 40
#define CAPACITY (FIRST_CHUNK_WORDS * ((UINT64_C(1) << DIRECTORY_SIZE) - 1))

#ifdef EFFECTFENCE_PLANT_RACE
/* Only for the tests that show that a race would be noticed: words as plain
 * numbers, compare-exchange as check-then-act, with a pause between the two now
 * and then so that it goes wrong on a busy machine too. */
#include <sched.h>
typedef uint64_t word;
#define WORD_LOAD(w) (*(w))
#define WORD_EXCHANGE_IF(w, expected, desired) planted_exchange((w), (expected), (desired))
static int planted_exchange(word *found, uint64_t *expected, uint64_t desired) {
    static _Thread_local unsigned calls;
    uint64_t held = *found;
    int equal = held == *expected;
    if (++calls % 64 == 0)
        sched_yield();
    if (equal)
        *found = desired;
    *expected = held;
    return equal;
}
#else
typedef _Atomic uint64_t word;
/* seq_cst: invariant W3. On x86-64 the load is a plain load either way and on
 * arm64 the same instruction as acquire, so the weaker order would buy nothing. */
#define WORD_LOAD(w) atomic_load_explicit((w), memory_order_seq_cst)
/* seq_cst both ways: W3; a failed exchange is a load whose answer the caller
 * acts upon, so it gets the load's order. Strong: the answer "it held what you
 * expected" is the answer "written", which a spurious failure would forge. */
#define WORD_EXCHANGE_IF(w, expected, desired)                              \
    atomic_compare_exchange_strong_explicit((w), (expected), (desired),     \
                                            memory_order_seq_cst, memory_order_seq_cst)
#endif

struct chunk {
    _Atomic uint64_t *born; /* one bit a word, set once it holds its first value */
    word *words;
};

struct ef_words {
    _Atomic uint64_t length;
    _Atomic(struct chunk *) directory[DIRECTORY_SIZE];
};

struct place {
    unsigned chunk;
    uint64_t offset;
};

static struct place place_of(uint64_t index);
static struct chunk *chunk_for(ef_words *words, unsigned number);
static word *find(const ef_words *words, uint64_t index);

static struct ef_answer refuse(enum ef_status why) {
    return (struct ef_answer){(int32_t)why, 0};
}

static struct ef_answer answer(uint64_t value) {
    return (struct ef_answer){EF_OK, value};
}

struct ef_answer ef_words_allocate(ef_words *words, uint64_t value) {
    /* relaxed: only a first guess, the exchange below decides. */
    uint64_t index = atomic_load_explicit(&words->length, memory_order_relaxed);
    struct place place;
    struct chunk *chunk;
    do {
        if (index >= CAPACITY)
            return refuse(EF_NO_MEMORY);
        place = place_of(index);
        chunk = chunk_for(words, place.chunk);
        if (chunk == NULL)
            return refuse(EF_NO_MEMORY);
        /* relaxed: the claim only shares out numbers. What others read is
         * handed over by the born bit, not by the length. */
    } while (!atomic_compare_exchange_weak_explicit(&words->length, &index, index + 1,
                                                    memory_order_relaxed, memory_order_relaxed));
#ifdef EFFECTFENCE_PLANT_RACE
    chunk->words[place.offset] = value;
#else
    /* relaxed: nobody may look before the born bit, whose release carries it. */
    atomic_store_explicit(&chunk->words[place.offset], value, memory_order_relaxed);
#endif
    /* release: whoever sees the bit sees the first value (W2). */
    atomic_fetch_or_explicit(&chunk->born[place.offset / 64], UINT64_C(1) << (place.offset % 64),
                             memory_order_release);
    return answer(index);
}

struct ef_answer ef_words_load(const ef_words *words, uint64_t index) {
    word *found = find(words, index);
    if (found == NULL)
        return refuse(EF_NO_SUCH_WORD);
    return answer(WORD_LOAD(found));
}

struct ef_answer ef_words_compare_exchange(ef_words *words, uint64_t index,
                                           uint64_t expected, uint64_t desired) {
    word *found = find(words, index);
    if (found == NULL)
        return refuse(EF_NO_SUCH_WORD);
    (void)WORD_EXCHANGE_IF(found, &expected, desired);
    return answer(expected);
}

struct ef_answer ef_words_fetch_add(ef_words *words, uint64_t index, uint64_t amount) {
    word *found = find(words, index);
    if (found == NULL)
        return refuse(EF_NO_SUCH_WORD);
    uint64_t held = WORD_LOAD(found);
    /* A loop, not atomic_fetch_add: that would wrap before anyone could refuse
     * (W5). It goes round again only because another thread got ahead (W4). */
    do {
        if (amount > UINT64_MAX - held)
            return refuse(EF_TOO_LARGE);
    } while (!WORD_EXCHANGE_IF(found, &held, held + amount));
    return answer(held);
}

uint64_t ef_words_length(const ef_words *words) {
    /* relaxed: a number that only grows and that nothing is read through. */
    return atomic_load_explicit(&words->length, memory_order_relaxed);
}

ef_words *ef_words_new(void) {
    ef_words *words = malloc(sizeof *words);
    if (words == NULL)
        return NULL;
    atomic_init(&words->length, 0);
    for (unsigned number = 0; number < DIRECTORY_SIZE; number++)
        atomic_init(&words->directory[number], NULL);
    return words;
}

void ef_words_free(ef_words *words) {
    if (words == NULL)
        return;
    for (unsigned number = 0; number < DIRECTORY_SIZE; number++)
        /* relaxed: the caller vouches that it is alone. */
        free(atomic_load_explicit(&words->directory[number], memory_order_relaxed));
    free(words);
}

/* The word with this index, or NULL while it is not born (W2). */
static word *find(const ef_words *words, uint64_t index) {
    if (index >= CAPACITY)
        return NULL;
    struct place place = place_of(index);
    /* acquire: pairs with the release in chunk_for; the chunk's own fields are
     * read through this pointer. */
    struct chunk *chunk =
        atomic_load_explicit(&words->directory[place.chunk], memory_order_acquire);
    if (chunk == NULL)
        return NULL;
    /* acquire: pairs with the release that set the bit; the first value is
     * there before the bit is (W2). */
    uint64_t born = atomic_load_explicit(&chunk->born[place.offset / 64], memory_order_acquire);
    if (!(born >> (place.offset % 64) & 1))
        return NULL;
    return &chunk->words[place.offset];
}

/* Chunk k starts at 64 * (2^k - 1), so index / 64 + 1 lies in [2^k, 2^(k+1)). */
static struct place place_of(uint64_t index) {
    uint64_t number = index / FIRST_CHUNK_WORDS + 1;
    unsigned chunk = 0;
    while (number >> (chunk + 1))
        chunk++;
    uint64_t start = FIRST_CHUNK_WORDS * ((UINT64_C(1) << chunk) - 1);
    return (struct place){chunk, index - start};
}

/* The chunk with this number, made if it is not there; NULL without memory.
 * Of several threads that make it at once, one publishes; the others take that
 * one and give their own back unseen. */
static struct chunk *chunk_for(ef_words *words, unsigned number) {
    _Atomic(struct chunk *) *entry = &words->directory[number];
    /* acquire: the chunk's own fields are read through this pointer. */
    struct chunk *chunk = atomic_load_explicit(entry, memory_order_acquire);
    if (chunk != NULL)
        return chunk;

    uint64_t count = FIRST_CHUNK_WORDS << number;
    if (count > SIZE_MAX / 16) /* the sum below is less than 16 bytes a word */
        return NULL;
    size_t bytes = sizeof *chunk + (size_t)(count / 64) * sizeof *chunk->born +
                   (size_t)count * sizeof *chunk->words;
    /* calloc: no bit is born. One block, so that one free gives it back. */
    struct chunk *made = calloc(1, bytes);
    if (made == NULL)
        return NULL;
    made->born = (_Atomic uint64_t *)(made + 1);
    made->words = (word *)(made->born + count / 64);

    /* release: whoever takes the pointer sees the fields above and the zeros.
     * acquire on failure: we are about to use the other thread's chunk. */
    if (atomic_compare_exchange_strong_explicit(entry, &chunk, made, memory_order_release,
                                                memory_order_acquire))
        return made;
    free(made);
    return chunk;
}
