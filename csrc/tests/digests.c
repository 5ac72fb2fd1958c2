/* Prints digests of bytes that the reader can make too, without Python: for
 * sanitizers and for CPUs that are emulated. tests/core/test_sanitizers.py
 * builds it and compares with hashlib.
 *
 *     digests IMPLEMENTATION LONGEST
 *
 * Byte i of every input is (151 i + 97) mod 256. For each length: "whole N
 * digest", the same in three pieces as "pieces N digest", and at the end all
 * lengths as spans of one buffer, "span N digest". Every input is a heap block
 * of exactly its length, so that a sanitizer sees one byte too far (H1).
 */
#include "../effectfence.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void print(const char *what, uint64_t length, const uint8_t *digest) {
    printf("%s %" PRIu64 " ", what, length);
    for (int byte = 0; byte < 32; byte++)
        printf("%02x", digest[byte]);
    printf("\n");
}

static uint8_t *bytes(uint64_t from, uint64_t length) {
    uint8_t *made = malloc((size_t)length);
    if (made == NULL && length != 0)
        abort();
    for (uint64_t byte = 0; byte < length; byte++)
        made[byte] = (uint8_t)(151 * (from + byte) + 97);
    return made;
}

static void one(int32_t implementation, uint64_t length) {
    uint8_t digest[32];
    uint8_t *whole = bytes(0, length);
    const uint8_t *alone[1] = {whole};
    if (ef_sha256(implementation, alone, &length, 1, digest) != EF_OK)
        abort();
    print("whole", length, digest);
    free(whole);

    uint64_t lengths[4] = {length / 3, 0, length / 2, length - length / 3 - length / 2};
    uint8_t *pieces[4] = {bytes(0, lengths[0]), NULL, bytes(lengths[0], lengths[2]),
                          bytes(lengths[0] + lengths[2], lengths[3])};
    const uint8_t *given[4] = {pieces[0], pieces[1], pieces[2], pieces[3]};
    if (ef_sha256(implementation, given, lengths, 4, digest) != EF_OK)
        abort();
    print("pieces", length, digest);
    for (int piece = 0; piece < 4; piece++)
        free(pieces[piece]);
}

static void spans(int32_t implementation, uint64_t longest) {
    uint64_t count = longest + 1;
    uint8_t *data = bytes(0, longest);
    uint8_t *digests = malloc((size_t)(32 * count));
    uint64_t *starts = calloc((size_t)count, sizeof *starts);
    uint64_t *ends = calloc((size_t)count, sizeof *ends);
    if (digests == NULL || starts == NULL || ends == NULL)
        abort();
    for (uint64_t length = 0; length < count; length++)
        ends[length] = length;
    if (ef_sha256_spans(implementation, data, longest, starts, ends, count, digests).status)
        abort();
    for (uint64_t length = 0; length < count; length++)
        print("span", length, digests + 32 * length);

    ends[longest / 2] = longest + 1;
    struct ef_answer refused =
        ef_sha256_spans(implementation, data, longest, starts, ends, count, digests);
    printf("refused %" PRId32 " %" PRIu64 "\n", refused.status, refused.value);
    free(data);
    free(digests);
    free(starts);
    free(ends);
}

int main(int count, char **arguments) {
    if (count != 3)
        return 2;
    int32_t implementation = (int32_t)atoi(arguments[1]);
    uint64_t longest = strtoull(arguments[2], NULL, 10);
    if (!ef_sha256_has(implementation)) {
        printf("not here, best is %" PRId32 "\n", ef_sha256_best());
        return 3;
    }
    for (uint64_t length = 0; length <= longest; length++)
        one(implementation, length);
    spans(implementation, longest);
    return 0;
}
