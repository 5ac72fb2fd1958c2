/* Four threads on the sequence words, without Python. Built by
 * tests/core/test_sanitizers.py with ThreadSanitizer, with AddressSanitizer and
 * UBSan, and plainly.
 *
 *     stress EXCHANGES      how many compare-exchanges in all
 *
 * Prints one line a part; exit 1 if a number was lost, won twice or seen early.
 */
#include "../effectfence.h"

#include <inttypes.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>

#define THREADS 4
#define ALLOCATIONS 20000

struct shared {
    ef_words *words;
    uint64_t word;
    uint64_t rounds; /* of each thread */
    _Atomic int at_the_line;
};

struct thread {
    pthread_t id;
    struct shared *shared;
    uint64_t number;
    uint64_t wins, sum, squares, wrong;
    uint64_t indexes[ALLOCATIONS];
};

static struct thread threads[THREADS];

static void run(struct shared *shared, void *(*body)(void *)) {
    atomic_init(&shared->at_the_line, 0);
    for (uint64_t number = 0; number < THREADS; number++) {
        struct thread *me = &threads[number];
        me->shared = shared;
        me->number = number;
        me->wins = me->sum = me->squares = me->wrong = 0;
        if (pthread_create(&me->id, NULL, body, me) != 0)
            abort();
    }
    for (int number = 0; number < THREADS; number++)
        pthread_join(threads[number].id, NULL);
}

/* Not pthread_barrier: macOS has none. */
static void start_together(struct shared *shared) {
    atomic_fetch_add(&shared->at_the_line, 1);
    while (atomic_load(&shared->at_the_line) < THREADS)
        continue;
}

/* Every thread tries to take the next number; a number has one winner. */
static void *exchange(void *argument) {
    struct thread *me = argument;
    struct shared *shared = me->shared;
    start_together(shared);
    uint64_t seen = ef_words_load(shared->words, shared->word).value;
    for (uint64_t round = 0; round < shared->rounds; round++) {
        uint64_t held =
            ef_words_compare_exchange(shared->words, shared->word, seen, seen + 1).value;
        if (held < seen)
            me->wrong++;
        if (held == seen)
            me->wins++, seen++;
        else
            seen = held;
    }
    return NULL;
}

static int exchanges(ef_words *words, uint64_t total) {
    struct shared shared = {.words = words, .word = ef_words_allocate(words, 0).value,
                            .rounds = total / THREADS};
    run(&shared, exchange);
    uint64_t wins = 0, wrong = 0, stands = ef_words_load(words, shared.word).value;
    for (int number = 0; number < THREADS; number++)
        wins += threads[number].wins, wrong += threads[number].wrong;
    printf("exchanges %" PRIu64 ": %" PRIu64 " won, stands at %" PRIu64 ", %" PRIu64 " backwards\n",
           total, wins, stands, wrong);
    return wins != stands || wrong != 0;
}

static void *add(void *argument) {
    struct thread *me = argument;
    struct shared *shared = me->shared;
    start_together(shared);
    for (uint64_t round = 0; round < shared->rounds; round++) {
        uint64_t old = ef_words_fetch_add(shared->words, shared->word, 1).value;
        me->sum += old;
        me->squares += old * old;
    }
    return NULL;
}

/* Numbers 0 to n-1 each once: their sum and the sum of their squares say so. */
static int additions(ef_words *words, uint64_t total) {
    struct shared shared = {.words = words, .word = ef_words_allocate(words, 0).value,
                            .rounds = total / THREADS};
    run(&shared, add);
    uint64_t sum = 0, squares = 0, stands = ef_words_load(words, shared.word).value;
    for (int number = 0; number < THREADS; number++)
        sum += threads[number].sum, squares += threads[number].squares;
    for (uint64_t old = 0; old < shared.rounds * THREADS; old++)
        sum -= old, squares -= old * old;
    printf("additions %" PRIu64 ": stands at %" PRIu64 ", %s\n", total, stands,
           sum || squares ? "NOT each once" : "each once");
    return stands != shared.rounds * THREADS || sum || squares;
}

static uint64_t first_value(uint64_t thread, uint64_t turn) {
    return (thread + 1) << 32 | turn;
}

/* Allocates, and looks where the others are just allocating: a word is either
 * not there or holds its first value, never the zero before it. */
static void *grow(void *argument) {
    struct thread *me = argument;
    struct shared *shared = me->shared;
    start_together(shared);
    for (uint64_t turn = 0; turn < ALLOCATIONS; turn++) {
        uint64_t mine = first_value(me->number, turn);
        struct ef_answer made = ef_words_allocate(shared->words, mine);
        me->indexes[turn] = made.value;
        if (made.status != EF_OK || ef_words_load(shared->words, made.value).value != mine)
            me->wrong++;
        struct ef_answer next = ef_words_load(shared->words, made.value + 1 + turn % 3);
        if (next.status == EF_OK && next.value == 0)
            me->wrong++;
    }
    return NULL;
}

static int growth(void) {
    ef_words *words = ef_words_new();
    if (words == NULL)
        return 1;
    struct shared shared = {.words = words};
    run(&shared, grow);
    uint64_t wrong = 0, length = ef_words_length(words);
    for (uint64_t number = 0; number < THREADS; number++) {
        wrong += threads[number].wrong;
        for (uint64_t turn = 0; turn < ALLOCATIONS; turn++)
            wrong += ef_words_load(words, threads[number].indexes[turn]).value !=
                     first_value(number, turn);
    }
    wrong += ef_words_load(words, length).status != EF_NO_SUCH_WORD;
    wrong += ef_words_load(words, UINT64_MAX).status != EF_NO_SUCH_WORD;
    printf("growth: %" PRIu64 " words, %" PRIu64 " wrong\n", length, wrong);
    ef_words_free(words);
    return wrong != 0 || length != THREADS * ALLOCATIONS;
}

int main(int count, char **arguments) {
    uint64_t total = count > 1 ? strtoull(arguments[1], NULL, 10) : 1000000;
    ef_words *words = ef_words_new();
    if (words == NULL)
        return 1;
    int failed = exchanges(words, total) | additions(words, total / 10) | growth();
    ef_words_free(words);
    return failed;
}
