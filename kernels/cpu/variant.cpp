// All operations for one instruction set, MT_VARIANT, which the compiler's options choose.
//
// Nothing of the standard library: its inline functions would exist once in the linked library, perhaps in
// instructions that the machine lacks.
#include "../dequantize_rows.hip"
#include "../pseudograd_pack.hip"
#include "../quantize_pack.hip"
#include "../quantize_pack_ef.hip"
#include "../quantize_rows.hip"
#include "../reduce_requant.hip"
#include "../reduce_segments.hip"
#include "../unpack.hip"
