// The path for AVX-512: F, BW, DQ and VL.
#if defined(__x86_64__)
#include "avx512.h"

#include "attention_path.h"
#include "row_matmul_path.h"

const unicache::Path unicache::avx512 = {attend<Queries>, finish, multiply};
#endif
