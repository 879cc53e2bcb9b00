"""The real CUDA allocator of the torch 2.11.0 wheel on an emulated runtime; opt-in, for half a gigabyte of wheel."""

from hbmtwin.validation.emulated.cuda.real import CudaBackend, EmulatedCuda
from hbmtwin.validation.emulated.cuda.traffic import CUDA_CONFIGURATIONS

__all__ = ["CUDA_CONFIGURATIONS", "CudaBackend", "EmulatedCuda"]
