// An envelope as a Sigstore bundle with a public key, held by Sigstore's own verifier: prints what
// became of it as it was written, with another key, and with one bit of what is signed changed.
// Run: node sigstore.js ENVELOPE KEY; needs @sigstore/bundle and @sigstore/verify.
const crypto = require("crypto");
const fs = require("fs");
const { bundleFromJSON } = require("@sigstore/bundle");
const { Verifier, toSignedEntity } = require("@sigstore/verify");

const NOBODY = { certificateAuthorities: [], timestampAuthorities: [], tlogs: [], ctlogs: [] };
const NO_LOG = { tlogThreshold: 0, ctlogThreshold: 0, timestampThreshold: 0 };

function believed(envelope, key) {
  const hint = envelope.signatures[0].keyid;
  const bundle = bundleFromJSON({
    mediaType: "application/vnd.dev.sigstore.bundle.v0.3+json",
    verificationMaterial: { publicKey: { hint }, tlogEntries: [] },
    dsseEnvelope: envelope,
  });
  const trust = { ...NOBODY, publicKey: () => ({ publicKey: key, validFor: () => true }) };
  try {
    new Verifier(trust, NO_LOG).verify(toSignedEntity(bundle));
    return "believed";
  } catch (error) {
    return error.message;
  }
}

const envelope = JSON.parse(fs.readFileSync(process.argv[2]));
const key = crypto.createPublicKey(fs.readFileSync(process.argv[3]));
const payload = Buffer.from(envelope.payload, "base64");
payload[payload.length >> 1] ^= 1;
console.log(believed(envelope, key));
console.log(believed(envelope, crypto.generateKeyPairSync("ed25519").publicKey));
console.log(believed({ ...envelope, payload: payload.toString("base64") }, key));
