#pragma once

#include <string>

namespace ltx {

inline constexpr int kMaxDevices = 64;

// What keeps CUDA code of this build from running on a device of this machine, e.g. "device 0 is sm_75, built for
// sm_80 sm_90a"; empty if nothing does. Looked up once a device.
const std::string& cuda_device_lacks(int device);

// 10 * major + minor, e.g. 90, of the architecture that the code which runs on the device was compiled for: an older
// one than the device's where that code is its PTX. And the number of multiprocessors. Cached: a launcher asks at every
// call.
int cuda_capability(int device);
int cuda_num_sms(int device);

}  // namespace ltx
