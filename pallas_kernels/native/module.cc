// The Python module pallas_kernels._native: FFI handlers as capsules, and packing at load.
// Limited API, so one build serves every later Python 3.
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "../quantized_matmul/pack.h"
#include "isa.h"
#include "xla/ffi/api/c_api.h"

// Each op's handlers.cc defines these with XLA_FFI_DEFINE_HANDLER_SYMBOL; one line here makes a
// handler known to Python by the same name.
#define JS_HANDLERS(X) \
  X(jaxserve_matmul)   \
  X(jaxserve_matmul_add) \
  X(jaxserve_gated_matmul) \
  X(jaxserve_take_rows) \
  X(jaxserve_rms_norm)  \
  X(jaxserve_rope)      \
  X(jaxserve_row_sum)   \
  X(jaxserve_zeros)     \
  X(jaxserve_gated_activation) \
  X(jaxserve_paged_attention)

namespace jaxserve {
#define DECLARE(name) extern "C" XLA_FFI_Error* name(XLA_FFI_CallFrame*);
JS_HANDLERS(DECLARE)
#undef DECLARE
}  // namespace jaxserve

namespace {

PyObject* handlers(PyObject*, PyObject*) {
  PyObject* all = PyDict_New();
  if (all == nullptr) return nullptr;
#define ADD(name)                                                                            \
  {                                                                                          \
    PyObject* capsule = PyCapsule_New(reinterpret_cast<void*>(jaxserve::name), nullptr, nullptr); \
    if (capsule == nullptr || PyDict_SetItemString(all, #name, capsule) != 0) {              \
      Py_XDECREF(capsule);                                                                   \
      Py_DECREF(all);                                                                        \
      return nullptr;                                                                        \
    }                                                                                        \
    Py_DECREF(capsule);                                                                      \
  }
  JS_HANDLERS(ADD)
#undef ADD
  return all;
}

PyObject* isa(PyObject*, PyObject*) {
  if (const char* problem = jaxserve::isa_problem()) {
    PyErr_SetString(PyExc_RuntimeError, problem);
    return nullptr;
  }
  return PyUnicode_FromString(jaxserve::isa_name());
}

PyObject* ffi_api(PyObject*, PyObject*) {
  return Py_BuildValue("(ii)", XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR);
}

PyObject* panel_bytes(PyObject*, PyObject* args) {
  int format;
  long long k, group;
  if (!PyArg_ParseTuple(args, "iLL", &format, &k, &group)) return nullptr;
  return PyLong_FromLongLong(jaxserve::panel_bytes(format, k, group));
}

// pack_panels(format, n, k, group, row_bytes, codes, scales, zeros, first, last, out): addresses as
// integers; pallas_kernels/quantized_matmul/cpu.py has checked every size.
PyObject* pack_panels(PyObject*, PyObject* args) {
  jaxserve::Rows rows;
  long long n, k, group, row_bytes, first, last;
  unsigned long long codes, scales, zeros, out;
  if (!PyArg_ParseTuple(args, "iLLLLKKKLLK", &rows.format, &n, &k, &group, &row_bytes, &codes,
                        &scales, &zeros, &first, &last, &out))
    return nullptr;
  rows.n = n, rows.k = k, rows.group = group, rows.row_bytes = row_bytes;
  rows.codes = reinterpret_cast<const uint8_t*>(codes);
  rows.scales = reinterpret_cast<const float*>(scales);
  rows.zeros = reinterpret_cast<const uint8_t*>(zeros);
  Py_BEGIN_ALLOW_THREADS;
  jaxserve::pack_panels(rows, first, last, reinterpret_cast<uint8_t*>(out));
  Py_END_ALLOW_THREADS;
  Py_RETURN_NONE;
}

PyMethodDef methods[] = {
    {"handlers", handlers, METH_NOARGS, "FFI target name -> capsule."},
    {"isa", isa, METH_NOARGS, "The instruction set in use."},
    {"ffi_api", ffi_api, METH_NOARGS, "(major, minor) of the XLA FFI it was built for."},
    {"panel_bytes", panel_bytes, METH_VARARGS, "Bytes of a panel (format, k, group)."},
    {"pack_panels", pack_panels, METH_VARARGS, "Pack panels [first, last) of a matrix."},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "_native", "Native CPU kernels of jaxserve.", 0, methods,
    nullptr, nullptr, nullptr, nullptr,
};

}  // namespace

PyMODINIT_FUNC PyInit__native() { return PyModule_Create(&module); }
