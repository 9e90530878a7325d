/* Checks a rotation in C against the test vectors of `rotary vectors CONFIG -o vectors.json`.
 *
 *     cc -std=c99 -O2 check_vectors.c -o check_vectors -lm && ./check_vectors vectors.json
 *
 * It works out cos and sin from inv_freq and the positions, rotates q and k, and compares. Put your
 * own functions in place of `table` and `rotate`. The reader relies on one line for each array,
 * which `rotary vectors` writes; any JSON library reads the file as well. Cases with several
 * position axes, and those of layers that rotate nothing, are skipped; if all are, that is an error.
 */
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SKIPPED = -1 };

/* The text after "key": in [from, to), or NULL. Keys are at the beginning of a line. */
static const char *find(const char *from, const char *to, const char *key) {
    char wanted[64];
    snprintf(wanted, sizeof wanted, "\n\"%s\": ", key);
    const char *at = strstr(from, wanted);
    return at && at < to ? at + strlen(wanted) : NULL;
}

/* A number inside the object at `text`, such as one tolerance. */
static double member(const char *text, const char *name) {
    char wanted[64];
    snprintf(wanted, sizeof wanted, "\"%s\": ", name);
    return atof(strstr(text, wanted) + strlen(wanted));
}

/* The hex words of an array, as numbers; *count is how many. A float64 is two float32 wide. */
static uint64_t *words(const char *text, size_t *count) {
    const char *at = strstr(text, "\"bits\": \"") + 9;
    uint64_t *numbers = malloc(strcspn(at, "\"") / 9 * sizeof *numbers + sizeof *numbers);
    for (*count = 0; *at != '"'; ++*count) {
        char *end;
        numbers[*count] = strtoull(at, &end, 16);
        at = *end == ' ' ? end + 1 : end;
    }
    return numbers;
}

static float *floats(const char *text, size_t *count) {
    uint64_t *bits = words(text, count);
    float *numbers = malloc(*count * sizeof *numbers + 1);
    for (size_t i = 0; i < *count; ++i) {
        uint32_t low = (uint32_t)bits[i];
        memcpy(numbers + i, &low, sizeof low);
    }
    free(bits);
    return numbers;
}

/* Whole numbers in brackets of any depth, up to the end of the line. */
static long long *wholes(const char *text, size_t *count) {
    size_t line = strcspn(text, "\n");
    long long *numbers = malloc(line * sizeof *numbers + 1);
    *count = 0;
    for (const char *at = text; at < text + line;) {
        at += strcspn(at, "-0123456789\n");
        if (at >= text + line) break;
        numbers[(*count)++] = strtoll(at, (char **)&at, 10);
    }
    return numbers;
}

/* Your cos and sin of one position and one pair. This one reduces the angle in float64. */
static void table(double inv_freq, long long position, double factor, double sign, float *cos_,
                  float *sin_) {
    double angle = fmod((double)position * inv_freq, 6.283185307179586);
    *cos_ = (float)(cos(angle) * factor);
    *sin_ = (float)(sin(angle) * factor * sign);
}

/* Your rotation of one head of one token. */
static void rotate(const float *x, float *y, const float *cos_, const float *sin_, size_t pairs,
                   const long long *read, const long long *written) {
    for (size_t p = 0; p < pairs; ++p) {
        float u = x[read[2 * p]], v = x[read[2 * p + 1]];
        y[written[2 * p]] = u * cos_[p] - v * sin_[p];
        y[written[2 * p + 1]] = v * cos_[p] + u * sin_[p];
    }
}

static int compare(size_t number, const char *name, const float *mine, const float *given,
                   size_t count, double allowed) {
    for (size_t i = 0; i < count; ++i)
        if (!(fabs((double)mine[i] - given[i]) <= allowed)) {
            printf("case %zu: %s: number %zu is %.9g, should be %.9g\n", number, name, i, mine[i],
                   given[i]);
            return 1;
        }
    return 0;
}

/* The number of arrays that differ, or SKIPPED. */
static int check_case(size_t number, const char *from, const char *to) {
    if (strncmp(find(from, to, "spec"), "null", 4) == 0) return SKIPPED; /* rotates nothing */
    if (atoi(find(from, to, "num_axes")) > 1) return SKIPPED;
    int faults = 0;
    const char *limits = find(from, to, "tolerance");
    double factor = atof(find(from, to, "attention_factor"));
    double sign = member(find(from, to, "spec"), "sign");
    size_t pairs, tokens, count, head_dim = (size_t)atoi(find(from, to, "head_dim"));
    uint64_t *bits = words(find(from, to, "inv_freq"), &pairs);
    double *inv_freq = malloc(pairs * sizeof *inv_freq);
    memcpy(inv_freq, bits, pairs * sizeof *inv_freq);
    long long *positions = wholes(strstr(find(from, to, "positions"), "\"values\""), &tokens);
    long long *read = wholes(find(from, to, "pairs"), &count);
    long long *written = wholes(find(from, to, "written_pairs"), &count);
    float *cos_ = malloc(tokens * pairs * sizeof *cos_);
    float *sin_ = malloc(tokens * pairs * sizeof *sin_);
    for (size_t i = 0; i < tokens * pairs; ++i)
        table(inv_freq[i % pairs], positions[i / pairs], factor, sign, cos_ + i, sin_ + i);
    const char *tables[] = {"cos", "sin"}, *inputs[] = {"q", "k"};
    for (int which = 0; which < 2; ++which) {
        float *given = floats(find(from, to, tables[which]), &count);
        faults += compare(number, tables[which], which ? sin_ : cos_, given, count,
                          member(limits, "cos_sin"));
        free(given);
    }
    for (int which = 0; which < 2; ++which) {
        char name[16];
        snprintf(name, sizeof name, "%s_rotated", inputs[which]);
        float *x = floats(find(from, to, inputs[which]), &count);
        float *given = floats(find(from, to, name), &count);
        float *y = malloc(count * sizeof *y);
        memcpy(y, x, count * sizeof *y);
        for (size_t row = 0; row < count / head_dim; ++row) { /* (heads, seq, head_dim) */
            size_t token = row % tokens;
            rotate(x + row * head_dim, y + row * head_dim, cos_ + token * pairs,
                   sin_ + token * pairs, pairs, read, written);
        }
        faults += compare(number, name, y, given, count, member(limits, "rotated"));
        free(x), free(y), free(given);
    }
    free(bits), free(inv_freq), free(positions), free(read), free(written), free(cos_), free(sin_);
    return faults;
}

int main(int argc, char **argv) {
    FILE *file = argc == 2 ? fopen(argv[1], "rb") : NULL;
    if (!file) return fprintf(stderr, "usage: check_vectors vectors.json\n"), 2;
    fseek(file, 0, SEEK_END);
    size_t size = (size_t)ftell(file);
    char *text = calloc(size + 1, 1);
    rewind(file);
    if (fread(text, 1, size, file) != size) return 2;
    fclose(file);
    if (!strstr(text, "\"format\": \"rotary-vectors\",\n\"version\": 1,"))
        return fprintf(stderr, "not version 1 of the format\n"), 2;
    size_t end = size;
    while (end > 0 && text[end - 1] == '\n') --end;
    if (end < 4 || memcmp(text + end - 4, "\n]\n}", 4) != 0)
        return fprintf(stderr, "the file has no end: it was cut short\n"), 2;
    size_t checked = 0, skipped = 0;
    int faults = 0;
    for (const char *at = text; (at = strstr(at, "\n\"layer_type\": ")); ++at) {
        const char *next = strstr(at + 1, "\n\"layer_type\": ");
        int found = check_case(checked + skipped, at, next ? next : text + size);
        if (found == SKIPPED) {
            ++skipped;
            continue;
        }
        ++checked;
        faults += found;
    }
    free(text);
    if (faults) return 1;
    printf("%s: %zu case%s", checked ? "ok" : "nothing was checked", checked,
           checked == 1 ? "" : "s");
    if (skipped) printf(", %zu skipped (several position axes, or no rotation)", skipped);
    printf("\n");
    return checked ? 0 : 2;
}
