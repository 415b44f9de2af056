/* The loss of a small GPT and its gradient by every tensor, each backward pass by hand.
 *
 *   cc -O2 -std=c99 gpt.c -o gpt -lm       (with -DSINGLE in float instead of double)
 *   ./gpt BUNDLE_FOLDER OUT_FOLDER
 *
 * Reads tokens.npy, targets.npy and weight/<parameter>.npy; writes loss.npy, value/<entry>.npy,
 * grad/<entry>.npy and grad/<parameter>.npy. Files are little-endian, and so must the machine be.
 *
 * B sequences of T tokens; V tokens in the vocabulary, C positions, E numbers per token. */

#define _POSIX_C_SOURCE 200809L /* for mkdir and stat */
#include <errno.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <tgmath.h>

/* <tgmath.h> picks expf or exp by the type of the argument. A constant with a decimal point is
 * double and would take the expression around it along, so each is a `real` of its own. */
#ifdef SINGLE
typedef float real;
#define REAL_TYPE "<f4"
#else
typedef double real;
#define REAL_TYPE "<f8"
#endif

static const real MASKED = (real)-1e9;
static const real SQRT_2_OVER_PI = (real)0.79788456080286535588;
static const real GELU_CUBIC = (real)0.044715;

/* A tensor is a matrix to most operations: its last axis is a row of `columns` numbers. */
typedef struct Tensor {
    char name[80];
    int is_parameter, axes;
    size_t shape[3], rows, columns;
    real *value, *grad; /* grad starts at 0, and every use of the tensor adds to it */
    struct Tensor *next;
} Tensor;

typedef struct {
    Tensor *weight, *bias; /* (out, in), (out) */
} Linear;

typedef struct {
    Tensor *x, *context, *attended, *output; /* (B, T, E); x is the output of the block before */
    Tensor *scores, *masked, *weights;       /* (B, T, T) */
    Tensor *hidden, *active;                 /* (B, T, 4E) */
    Linear attention, expand, contract;
} Block;

typedef struct {
    int64_t *tokens, *targets;                   /* (B, T) */
    Tensor *token_table, *position_table;        /* (V, E), (C, E) */
    Tensor *of_tokens, *of_positions, *embedded; /* (B, T, E), (T, E), (B, T, E) */
    Block *blocks, *end;                         /* `end` is one past the last block */
    Linear output;
    Tensor *logits; /* (B, T, V) */
} Model;

static Tensor *all_tensors = NULL; /* the results are written from this list */

static void fail(const char *subject, const char *reason) {
    fprintf(stderr, "gpt: %s: %s\n", subject, reason);
    exit(2);
}

static void *allocate(size_t count, size_t size) {
    void *memory = calloc(count, size);
    if (!memory) fail("memory", "not enough for tensors of these sizes");
    return memory;
}

/* ---- Operations. In the comments, dx is the gradient of the loss by x. ---- */

static real dot(const real *a, const real *b, size_t n) {
    real sum = 0;
    for (size_t i = 0; i < n; i++) sum += a[i] * b[i];
    return sum;
}

static void add_scaled(real *y, real a, const real *x, size_t n) {
    for (size_t i = 0; i < n; i++) y[i] += a * x[i];
}

/* x_bt = token_table[token_bt] + position_table[t] */
static void embed(Model *m) {
    size_t E = m->embedded->columns, T = m->of_positions->rows;
    add_scaled(m->of_positions->value, 1, m->position_table->value, T * E);
    for (size_t n = 0; n < m->embedded->rows; n++) {
        const real *token = m->token_table->value + (size_t)m->tokens[n] * E;
        add_scaled(m->of_tokens->value + n * E, 1, token, E);
        add_scaled(m->embedded->value + n * E, 1, token, E);
        add_scaled(m->embedded->value + n * E, 1, m->of_positions->value + n % T * E, E);
    }
}

/* A row of a table gets the sum over all places where it was used. */
static void embed_backward(Model *m) {
    size_t E = m->embedded->columns, T = m->of_positions->rows;
    for (size_t n = 0; n < m->embedded->rows; n++) {
        const real *grad = m->embedded->grad + n * E;
        add_scaled(m->of_tokens->grad + n * E, 1, grad, E);
        add_scaled(m->token_table->grad + (size_t)m->tokens[n] * E, 1, grad, E);
        add_scaled(m->of_positions->grad + n % T * E, 1, grad, E);
    }
    add_scaled(m->position_table->grad, 1, m->of_positions->grad, T * E);
}

/* y = x W^T + b */
static void linear(Tensor *y, const Tensor *x, Linear l) {
    size_t in = x->columns, out = y->columns;
    for (size_t n = 0; n < x->rows; n++)
        for (size_t o = 0; o < out; o++) {
            const real *weight = l.weight->value + o * in;
            y->value[n * out + o] = dot(x->value + n * in, weight, in) + l.bias->value[o];
        }
}

/* dx = dy W,  dW = dy^T x,  db = sum of dy over the rows */
static void linear_backward(const Tensor *y, Tensor *x, Linear l) {
    size_t in = x->columns, out = y->columns;
    for (size_t n = 0; n < x->rows; n++)
        for (size_t o = 0; o < out; o++) {
            real g = y->grad[n * out + o];
            add_scaled(x->grad + n * in, g, l.weight->value + o * in, in);
            add_scaled(l.weight->grad + o * in, g, x->value + n * in, in);
            l.bias->grad[o] += g;
        }
}

/* p = exp(x - max x) / sum(exp(x - max x)), and returns log(sum(exp(x))). */
static real softmax(real *p, const real *x, size_t n) {
    real max = x[0], sum = 0;
    for (size_t i = 1; i < n; i++) max = x[i] > max ? x[i] : max;
    for (size_t i = 0; i < n; i++) sum += p[i] = exp(x[i] - max);
    for (size_t i = 0; i < n; i++) p[i] /= sum;
    return max + log(sum);
}

/* dx = p (dp - dp . p) */
static void softmax_backward(const real *p, const real *dp, real *dx, size_t n) {
    real mean = dot(dp, p, n);
    for (size_t i = 0; i < n; i++) dx[i] += p[i] * (dp[i] - mean);
}

/* s_ij = x_i . x_j / sqrt(E),  p = softmax(s_ij where j <= i, else -1e9),  c_i = sum_j p_ij x_j,
 * within each sequence. Row n is position i = n % T of a sequence that begins at row n - i. */
static void attention(Block *b) {
    size_t E = b->x->columns, T = b->scores->columns;
    for (size_t n = 0; n < b->x->rows; n++) {
        const real *query = b->x->value + n * E, *sequence = b->x->value + (n - n % T) * E;
        real *score = b->scores->value + n * T, *masked = b->masked->value + n * T;
        real *weight = b->weights->value + n * T;
        for (size_t j = 0; j < T; j++) {
            score[j] = dot(query, sequence + j * E, E) / sqrt((real)E);
            masked[j] = j <= n % T ? score[j] : MASKED;
        }
        softmax(weight, masked, T);
        for (size_t j = 0; j < T; j++)
            add_scaled(b->context->value + n * E, weight[j], sequence + j * E, E);
    }
}

/* dp_ij = dc_i . x_j. Each x gets three gradients: dx_j = sum_i p_ij dc_i as what is averaged,
 * dx_i = sum_j ds_ij x_j / sqrt(E) as query and dx_j = sum_i ds_ij x_i / sqrt(E) as key. */
static void attention_backward(Block *b) {
    size_t E = b->x->columns, T = b->scores->columns;
    for (size_t n = 0; n < b->x->rows; n++) {
        const real *query = b->x->value + n * E, *sequence = b->x->value + (n - n % T) * E;
        const real *weight = b->weights->value + n * T, *dcontext = b->context->grad + n * E;
        real *dquery = b->x->grad + n * E, *dsequence = b->x->grad + (n - n % T) * E;
        real *dweight = b->weights->grad + n * T, *dmasked = b->masked->grad + n * T;
        for (size_t j = 0; j < T; j++) {
            dweight[j] += dot(dcontext, sequence + j * E, E);
            add_scaled(dsequence + j * E, weight[j], dcontext, E);
        }
        softmax_backward(weight, dweight, dmasked, T);
        for (size_t j = 0; j <= n % T; j++) {
            real g = dmasked[j] / sqrt((real)E);
            b->scores->grad[n * T + j] += dmasked[j];
            add_scaled(dquery, g, sequence + j * E, E);
            add_scaled(dsequence + j * E, g, query, E);
        }
    }
}

static real gelu_tanh(real x) { return tanh(SQRT_2_OVER_PI * x * (1 + GELU_CUBIC * x * x)); }

/* y = x/2 (1 + tanh(u)),  u = sqrt(2/pi) (x + 0.044715 x^3) */
static void gelu(Tensor *y, const Tensor *x) {
    for (size_t i = 0; i < y->rows * y->columns; i++)
        y->value[i] = x->value[i] / 2 * (1 + gelu_tanh(x->value[i]));
}

/* dx = dy (1 + t + x (1 - t^2) u') / 2,  t = tanh(u) */
static void gelu_backward(const Tensor *y, Tensor *x) {
    for (size_t i = 0; i < y->rows * y->columns; i++) {
        real v = x->value[i], t = gelu_tanh(v);
        real du = SQRT_2_OVER_PI * (1 + 3 * GELU_CUBIC * v * v);
        x->grad[i] += y->grad[i] * (1 + t + v * (1 - t * t) * du) / 2;
    }
}

/* Mean over the rows of log(sum(exp(x))) - x_target; leaves softmax(x) in dx for the way back. */
static real cross_entropy(Tensor *x, const int64_t *targets) {
    size_t V = x->columns;
    real sum = 0;
    for (size_t n = 0; n < x->rows; n++) {
        const real *row = x->value + n * V;
        sum += softmax(x->grad + n * V, row, V) - row[targets[n]];
    }
    return sum / (real)x->rows;
}

/* dx = (softmax(x) - onehot(target)) / rows */
static void cross_entropy_backward(Tensor *x, const int64_t *targets) {
    size_t V = x->columns;
    for (size_t n = 0; n < x->rows; n++) {
        real *grad = x->grad + n * V;
        grad[targets[n]] -= 1;
        for (size_t v = 0; v < V; v++) grad[v] /= (real)x->rows;
    }
}

static real forward(Model *m) {
    embed(m);
    for (Block *b = m->blocks; b < m->end; b++) {
        attention(b);
        linear(b->attended, b->context, b->attention);
        linear(b->hidden, b->attended, b->expand);
        gelu(b->active, b->hidden);
        linear(b->output, b->active, b->contract);
    }
    linear(m->logits, m->end[-1].output, m->output);
    return cross_entropy(m->logits, m->targets);
}

static void backward(Model *m) {
    cross_entropy_backward(m->logits, m->targets);
    linear_backward(m->logits, m->end[-1].output, m->output);
    Block *b = m->end;
    while (b > m->blocks) {
        b--;
        linear_backward(b->output, b->active, b->contract);
        gelu_backward(b->active, b->hidden);
        linear_backward(b->hidden, b->attended, b->expand);
        linear_backward(b->attended, b->context, b->attention);
        attention_backward(b);
    }
    embed_backward(m);
}

/* ---- Files ---- */

/* One path of three pieces, valid until the next call. */
static const char *path_of(const char *folder, const char *part, const char *name) {
    static char path[4096];
    const char *ending = *name ? ".npy" : "";
    int length = snprintf(path, sizeof path, "%s/%s%s%s", folder, part, name, ending);
    if (length < 0 || (size_t)length >= sizeof path) fail(folder, "is too long a path");
    return path;
}

/* The items of an .npy file: `real` for kind 'f', int64_t for kind 'i'. A size of 0 in `shape` is
 * filled in from the file, any other is needed. */
static void *read_npy(const char *path, char kind, int axes, size_t *shape) {
    unsigned char start[10];
    char header[65536] = "", type[4] = "", *end;
    FILE *file = fopen(path, "rb");
    if (!file) fail(path, strerror(errno));
    if (fread(start, 1, 10, file) != 10 || memcmp(start, "\x93NUMPY\x01", 8))
        fail(path, "is not an .npy file of version 1.0");
    size_t length = start[8] + 256u * start[9], count = 1;
    if (fread(header, 1, length, file) != length) fail(path, "ends within its header");
    const char *descr = strstr(header, "'descr': '"), *at = strstr(header, "'shape': (");
    if (!descr || !at || !strstr(header, "'fortran_order': False"))
        fail(path, "is not an array in C order");
    sscanf(descr, "'descr': '%3[^']", type);
    if (kind == 'i' ? strcmp(type, "<i8") : strcmp(type, "<f4") && strcmp(type, "<f8"))
        fail(path, kind == 'i' ? "is not int64" : "is neither float32 nor float64");
    at += strlen("'shape': (");
    for (int axis = 0; axis < axes; axis++, at = end + strspn(end, ", ")) {
        size_t size = strtoull(at, &end, 10), needed = shape[axis];
        /* At most 2^30 items, so that no product of sizes overflows later. */
        if (end == at || size == 0 || size > (1u << 30) / count || (needed && size != needed))
            fail(path, "has another shape than is needed");
        count *= shape[axis] = size;
    }
    if (*at != ')') fail(path, "has more axes than are needed");
    size_t width = type[2] == '4' ? 4 : 8;
    void *items = allocate(count, width);
    if (fread(items, width, count, file) != count || fgetc(file) != EOF)
        fail(path, "is shorter or longer than its shape says");
    fclose(file);
    if (kind == 'i') return items;
    real *converted = allocate(count, sizeof(real));
    for (size_t i = 0; i < count; i++)
        converted[i] = width == 4 ? (real)((float *)items)[i] : (real)((double *)items)[i];
    free(items);
    return converted;
}

static void write_npy(const char *path, int axes, const size_t *shape, const real *items) {
    char text[128] = "{'descr': '" REAL_TYPE "', 'fortran_order': False, 'shape': (";
    size_t count = 1;
    for (int axis = 0; axis < axes; axis++) {
        sprintf(text + strlen(text), "%zu, ", shape[axis]);
        count *= shape[axis];
    }
    FILE *file = fopen(path, "wb");
    if (!file) fail(path, strerror(errno));
    fwrite("\x93NUMPY\x01\x00\x76\x00", 1, 10, file); /* 0x76 = 118 bytes of text follow */
    fprintf(file, "%s)}%*s\n", text, 115 - (int)strlen(text), "");
    size_t written = fwrite(items, sizeof(real), count, file);
    if (fclose(file) || written != count) fail(path, "could not be written");
}

static Tensor *new_tensor(const char *name, int axes, const size_t *shape) {
    Tensor *t = allocate(1, sizeof *t);
    snprintf(t->name, sizeof t->name, "%s", name);
    t->axes = axes;
    t->rows = 1;
    for (int axis = 0; axis < axes - 1; axis++) t->rows *= shape[axis];
    t->columns = shape[axes - 1];
    memcpy(t->shape, shape, (size_t)axes * sizeof *shape);
    t->value = allocate(t->rows * t->columns, sizeof(real));
    t->grad = allocate(t->rows * t->columns, sizeof(real));
    t->next = all_tensors;
    return all_tensors = t;
}

static Tensor *read_parameter(const char *folder, const char *name, int axes, size_t *shape) {
    real *items = read_npy(path_of(folder, "weight/", name), 'f', axes, shape);
    Tensor *t = new_tensor(name, axes, shape);
    free(t->value);
    t->value = items;
    t->is_parameter = 1;
    return t;
}

static Linear read_linear(const char *folder, const char *layer, size_t in, size_t out) {
    char name[100];
    Linear l;
    sprintf(name, "%s.weight", layer);
    l.weight = read_parameter(folder, name, 2, (size_t[]){out, in});
    sprintf(name, "%s.bias", layer);
    l.bias = read_parameter(folder, name, 1, (size_t[]){out});
    return l;
}

static int64_t *read_ids(const char *path, size_t *shape, size_t vocabulary) {
    int64_t *ids = read_npy(path, 'i', 2, shape);
    for (size_t n = 0; n < shape[0] * shape[1]; n++)
        if (ids[n] < 0 || (uint64_t)ids[n] >= vocabulary) fail(path, "has an id out of range");
    return ids;
}

/* "transformers.<block>.<rest>", valid until the next call. */
static const char *in_block(int block, const char *rest) {
    static char name[80];
    snprintf(name, sizeof name, "transformers.%d.%s", block, rest);
    return name;
}

static void read_block(Block *b, const char *folder, int i, Tensor *x) {
    size_t B = x->shape[0], T = x->shape[1], E = x->shape[2];
    size_t square[] = {B, T, T}, narrow[] = {B, T, E}, wide[] = {B, T, 4 * E};
    b->x = x;
    b->scores = new_tensor(in_block(i, "attention.mask.input"), 3, square);
    b->masked = new_tensor(in_block(i, "attention.mask.output"), 3, square);
    b->weights = new_tensor(in_block(i, "attention.softmax.output"), 3, square);
    b->context = new_tensor(in_block(i, "attention.output.input"), 3, narrow);
    b->attended = new_tensor(in_block(i, "attention.output.output"), 3, narrow);
    b->hidden = new_tensor(in_block(i, "feed_forward.input.output"), 3, wide);
    b->active = new_tensor(in_block(i, "feed_forward.gelu.output"), 3, wide);
    b->output = new_tensor(in_block(i, "feed_forward.output.output"), 3, narrow);
    b->attention = read_linear(folder, in_block(i, "attention.output"), E, E);
    b->expand = read_linear(folder, in_block(i, "feed_forward.input"), E, 4 * E);
    b->contract = read_linear(folder, in_block(i, "feed_forward.output"), 4 * E, E);
}

static void read_model(Model *m, const char *folder) {
    size_t ids[] = {0, 0}, table[] = {0, 0};
    m->token_table = read_parameter(folder, "embedding.embedding.weight", 2, table);
    size_t V = table[0], E = table[1], places[] = {0, E};
    m->position_table = read_parameter(folder, "embedding.positional_embedding.weight", 2, places);
    m->tokens = read_ids(path_of(folder, "", "tokens"), ids, V);
    m->targets = read_ids(path_of(folder, "", "targets"), ids, V);
    size_t B = ids[0], T = ids[1];
    if (T > places[0]) fail(folder, "has more tokens in a sequence than positions");
    m->of_tokens = new_tensor("embedding.embedding.output", 3, (size_t[]){B, T, E});
    m->of_positions = new_tensor("embedding.positional_embedding.output", 2, (size_t[]){T, E});
    m->embedded = new_tensor("embedding.output", 3, (size_t[]){B, T, E});
    struct stat found;
    int count = 1; /* one block is needed; there are as many as have weights */
    while (!stat(path_of(folder, "weight/", in_block(count, "attention.output.weight")), &found))
        count++;
    m->blocks = allocate((size_t)count, sizeof *m->blocks);
    m->end = m->blocks + count;
    for (int i = 0; i < count; i++)
        read_block(&m->blocks[i], folder, i, i > 0 ? m->blocks[i - 1].output : m->embedded);
    m->output = read_linear(folder, "output.output", E, V);
    m->logits = new_tensor("output.output.output", 3, (size_t[]){B, T, V});
}

static void write_results(const char *out, real loss) {
    /* A folder that cannot be made shows when the first file in it is written. */
    mkdir(out, 0777);
    mkdir(path_of(out, "value", ""), 0777);
    mkdir(path_of(out, "grad", ""), 0777);
    write_npy(path_of(out, "", "loss"), 0, NULL, &loss);
    for (Tensor *t = all_tensors; t; t = t->next) {
        write_npy(path_of(out, "grad/", t->name), t->axes, t->shape, t->grad);
        if (!t->is_parameter)
            write_npy(path_of(out, "value/", t->name), t->axes, t->shape, t->value);
    }
}

int main(int argc, char **argv) {
    static Model model; /* in use until the program ends, as all tensors are: nothing is freed */
    if (argc != 3) fail("usage", "gpt BUNDLE_FOLDER OUT_FOLDER");
    read_model(&model, argv[1]);
    real loss = forward(&model);
    backward(&model);
    write_results(argv[2], loss);
    return 0;
}
