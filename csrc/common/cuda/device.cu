#include <cuda_runtime.h>

#include <array>
#include <mutex>

#include "common/built.h"
#include "common/check.h"
#include "common/device.h"

namespace ltx {

namespace {

struct DeviceInfo {
  std::once_flag once;
  int capability = 0;
  int num_sms = 0;
  std::string lacking;
};

// Compiled for the same architectures as every op: the device can load it exactly if it can load them.
__global__ void probe_kernel() {}

std::string sm_name(int capability) { return "sm_" + std::to_string(capability); }

void look_up(int device, DeviceInfo& info) {
  constexpr int kDriverFor13 = 13000;
  int driver = 0;
  cudaError_t status = cudaDriverGetVersion(&driver);
  if (status == cudaSuccess && driver < kDriverFor13) {
    info.lacking = "needs driver >= 580, found one for CUDA " + std::to_string(driver / 1000) + "." +
                   std::to_string(driver % 1000 / 10);
    return;
  }
  int major = 0;
  int minor = 0;
  if (status == cudaSuccess) status = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  if (status == cudaSuccess) status = cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device);
  if (status == cudaSuccess) status = cudaDeviceGetAttribute(&info.num_sms, cudaDevAttrMultiProcessorCount, device);

  int current = 0;
  if (status == cudaSuccess) status = cudaGetDevice(&current);
  if (status == cudaSuccess) status = cudaSetDevice(device);
  if (status == cudaSuccess) {
    cudaFuncAttributes attributes;
    status = cudaFuncGetAttributes(&attributes, probe_kernel);
    if (status == cudaErrorNoKernelImageForDevice || status == cudaErrorUnsupportedPtxVersion) {
      cudaGetLastError();  // it is told below and must not be found by a later launch
      status = cudaSuccess;
      info.lacking = "device " + std::to_string(device) + " is " + sm_name(major * 10 + minor) + ", built for " +
                     kBuiltArchitectures;
    } else if (status == cudaSuccess) {
      info.capability = attributes.ptxVersion;
    }
    const cudaError_t restored = cudaSetDevice(current);
    if (status == cudaSuccess) status = restored;
  }
  if (status != cudaSuccess) {
    cudaGetLastError();
    info.lacking = std::string("CUDA: ") + cudaGetErrorString(status);
  }
}

DeviceInfo& device_info(int device) {
  static std::array<DeviceInfo, kMaxDevices> infos;
  LTX_CHECK(device >= 0 && device < kMaxDevices,
            "ltx_kernels: device must be below " + std::to_string(kMaxDevices) + ", got " + std::to_string(device));
  DeviceInfo& info = infos[device];
  std::call_once(info.once, look_up, device, std::ref(info));
  return info;
}

}  // namespace

const std::string& cuda_device_lacks(int device) { return device_info(device).lacking; }
int cuda_capability(int device) { return device_info(device).capability; }
int cuda_num_sms(int device) { return device_info(device).num_sms; }

}  // namespace ltx
