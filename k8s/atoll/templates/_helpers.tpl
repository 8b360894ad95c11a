{{- define "atoll.fullname" -}}
{{- $own := ternary .Release.Name (printf "%s-%s" .Release.Name .Chart.Name) (contains .Chart.Name .Release.Name) -}}
{{- .Values.fullnameOverride | default $own | trunc 40 | trimSuffix "-" -}}
{{- end }}

{{/* The templates below take (list $ COMPONENT), with core, front, learner or dashboard. */}}

{{- define "atoll.name" -}}
{{- printf "%s-%s" (include "atoll.fullname" (first .)) (last .) -}}
{{- end }}

{{- define "atoll.selector" -}}
app.kubernetes.io/name: atoll
app.kubernetes.io/instance: {{ (first .).Release.Name }}
app.kubernetes.io/component: {{ last . }}
{{- end }}

{{- define "atoll.labels" -}}
{{- $root := first . -}}
{{ include "atoll.selector" . }}
app.kubernetes.io/part-of: atoll
app.kubernetes.io/version: {{ $root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ $root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" $root.Chart.Name $root.Chart.Version | replace "+" "_" }}
{{- end }}

{{- define "atoll.image" -}}
{{- $all := (first .).Values.image -}}
{{- $own := (get (first .).Values (last .)).image -}}
{{- $registry := ternary (printf "%s/" (trimSuffix "/" $all.registry)) "" (ne $all.registry "") -}}
{{- $own.repository | default (printf "%satoll-%s" $registry (last .)) -}}
{{- if $own.digest }}@{{ $own.digest }}{{ else }}:{{ $own.tag | default $all.tag | default (first .).Chart.AppVersion }}{{ end -}}
{{- end }}

{{- define "atoll.serviceAccount" -}}
{{- $values := get (first .).Values (last .) -}}
apiVersion: v1
kind: ServiceAccount
metadata:
  name: {{ include "atoll.name" . }}
  labels: {{- include "atoll.labels" . | nindent 4 }}
  {{- with $values.serviceAccountAnnotations }}
  annotations: {{- toYaml . | nindent 4 }}
  {{- end }}
automountServiceAccountToken: false
{{- end }}

{{/* Labels and annotations of a component's pods. */}}
{{- define "atoll.podMetadata" -}}
{{- $values := get (first .).Values (last .) -}}
labels:
  {{- include "atoll.selector" . | nindent 2 }}
  {{- with $values.podLabels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- with $values.podAnnotations }}
annotations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* Common fields of all pods, without containers and volumes. */}}
{{- define "atoll.pod" -}}
{{- $root := first . -}}
{{- $values := get $root.Values (last .) -}}
serviceAccountName: {{ include "atoll.name" . }}
{{ include "atoll.podSecurity" $root }}
terminationGracePeriodSeconds: {{ $values.terminationGracePeriodSeconds }}
{{- with $values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with $values.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $values.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $values.affinity }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* User, environment and registry password of all pods, also of tests. */}}
{{- define "atoll.podSecurity" -}}
automountServiceAccountToken: false
# Otherwise Kubernetes sets ATOLL_CORE_PORT and similar variables for the Services, and Atoll would read them as options.
enableServiceLinks: false
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile: {type: RuntimeDefault}
{{- with .Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- end }}

{{/* Common fields of all containers, without arguments, probes and resources. */}}
{{- define "atoll.container" -}}
image: {{ include "atoll.image" . }}
imagePullPolicy: {{ (first .).Values.image.pullPolicy }}
securityContext:
  allowPrivilegeEscalation: false
  capabilities: {drop: [ALL]}
  readOnlyRootFilesystem: true
{{- end }}

{{/* Mounts the Secret as a directory. With subPath, new certificates would not reach a running process. */}}
{{- define "atoll.tlsVolume" -}}
- name: tls
  secret:
    secretName: {{ (get (first .).Values (last .)).tlsSecret }}
    {{- include "atoll.tlsFiles" (first .) | nindent 4 }}
{{- end }}

{{- define "atoll.tlsFiles" -}}
defaultMode: 0440
{{- if .Values.tls.certManager.enabled }}
items:
  - {key: ca.crt, path: ca.pem}
  - {key: tls.crt, path: cert.pem}
  - {key: tls.key, path: key.pem}
{{- end }}
{{- end }}

{{- define "atoll.common-args" -}}
- --tls=/etc/atoll/tls
- --metrics-listen=0.0.0.0:9100
- --metrics-plaintext
{{- end }}

{{- define "atoll.probe" -}}
httpGet: {path: {{ . }}, port: metrics}
timeoutSeconds: 5
{{- end }}

{{/* The Service of a component; takes (list $ PORT COMPONENT). */}}
{{- define "atoll.service" -}}
{{- $who := list (first .) (last .) -}}
{{- $service := (get (first .).Values (last .)).service -}}
apiVersion: v1
kind: Service
metadata:
  name: {{ include "atoll.name" $who }}
  labels: {{- include "atoll.labels" $who | nindent 4 }}
  {{- with $service.annotations }}
  annotations: {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  type: {{ $service.type }}
  {{- if eq $service.type "LoadBalancer" }}
  externalTrafficPolicy: Local  # keeps callers' addresses, which network policies and audit logs use
  {{- with $service.loadBalancerSourceRanges }}
  loadBalancerSourceRanges: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- end }}
  {{- if and (eq (last .) "core") (first .).Values.core.standby }}
  publishNotReadyAddresses: true  # the pod is not ready while a crashed container restarts, but the other one serves
  {{- end }}
  {{- if eq (last .) "front" }}
  sessionAffinity: ClientIP  # all connections of a learner go to the same front, which has the updates in its cache
  {{- end }}
  selector:
    {{- include "atoll.selector" $who | nindent 4 }}
    {{- if and (eq (last .) "core") (gt (int (first .).Values.core.shards) 1) }}
    statefulset.kubernetes.io/pod-name: {{ include "atoll.name" $who }}-0  # the registrar, which knows the other shards' addresses
    {{- end }}
  ports:
    - {name: grpc, port: {{ index . 1 }}, targetPort: grpc, protocol: TCP}
{{- end }}

{{/* Host names of a core, front or dashboard, one per line. localhost is for `kubectl port-forward`. */}}
{{- define "atoll.ownHosts" -}}
{{- $service := include "atoll.name" . -}}
{{- $namespace := (first .).Release.Namespace -}}
{{ $service }}
{{ $service }}.{{ $namespace }}.svc
{{ $service }}.{{ $namespace }}.svc.cluster.local
{{- if and (eq (last .) "core") (gt (int (first .).Values.core.shards) 1) }}
*.{{ include "atoll.shardDomain" (first .) }}
{{- end }}
localhost
{{- range (get (first .).Values (last .)).hosts }}
{{ . }}
{{- end }}
{{- if and (eq (last .) "dashboard") (first .).Values.dashboard.ingress.enabled }}
{{ (first .).Values.dashboard.ingress.host }}
{{- end }}
{{- end }}

{{/* The domain of the shards' names, which are POD.DOMAIN. A wildcard certificate needs two dots in the domain. */}}
{{- define "atoll.shardDomain" -}}
{{- $own := printf "%s-pods.%s.svc" (include "atoll.name" (list . "core")) .Release.Namespace -}}
{{- .Values.core.shardDomain | default $own -}}
{{- end }}

{{/* The run's settings as arguments of `atoll core`, as a JSON array. The schema allows no characters that a shell interprets. */}}
{{- define "atoll.runSettings" -}}
{{- $found := list -}}
{{- range $name, $value := .Values.core.settings -}}
{{- if kindIs "bool" $value -}}
{{- $found = append $found (printf "--%s%s" (ternary "" "no-" $value) (kebabcase $name)) -}}
{{- else -}}
{{- $text := ternary $value (toJson $value) (kindIs "string" $value) -}}{{/* 1000000, and not 1e+06 */}}
{{- $found = append $found (printf "--%s=%s" (kebabcase $name) $text) -}}
{{- end -}}
{{- end -}}
{{- toJson $found -}}
{{- end }}

{{/* HOST:PORT of the core that fronts call. */}}
{{- define "atoll.coreAddress" -}}
{{- $own := ternary (printf "%s:7070" (include "atoll.name" (list . "core"))) "" .Values.core.enabled -}}
{{- .Values.front.core | default $own | required "front.core is required if core.enabled is false: give the core's HOST:PORT" -}}
{{- end }}

{{/* HOST:PORT of the core that the dashboard calls. */}}
{{- define "atoll.dashboardServer" -}}
{{- $own := ternary (printf "%s:7070" (include "atoll.name" (list . "core"))) "" .Values.core.enabled -}}
{{- $said := "dashboard.server is required if core.enabled is false: give the core's HOST:PORT" -}}
{{- .Values.dashboard.server | default $own | required $said -}}
{{- end }}

{{/* The dashboard's address for operators, with which the alerts' runbook_url begins. */}}
{{- define "atoll.dashboardUrl" -}}
{{- $ingress := .Values.dashboard.ingress -}}
{{- $own := "http://localhost:7080" -}}
{{- if and .Values.dashboard.enabled $ingress.enabled -}}
{{- $own = printf "%s://%s" (ternary "https" "http" (ne $ingress.tlsSecret "")) $ingress.host -}}
{{- end -}}
{{- .Values.dashboard.url | default $own -}}
{{- end }}

{{/* The label `run` of all series. */}}
{{- define "atoll.run" -}}
{{- .Values.monitoring.run | default (printf "%s/%s" .Release.Namespace .Release.Name) -}}
{{- end -}}

{{/* The component of this release that learners call: front, core, or none. */}}
{{- define "atoll.learnersCall" -}}
{{- if .Values.learner.servers }}none{{ else if .Values.front.enabled }}front{{ else if .Values.core.enabled }}core{{ else -}}
{{- fail "learner.servers is required unless front.enabled or core.enabled is true: give HOST:PORT of each front" -}}
{{- end -}}
{{- end }}

{{- define "atoll.learnersServers" -}}
{{- $called := include "atoll.learnersCall" . -}}
{{- if eq $called "none" -}}
{{- toJson .Values.learner.servers -}}
{{- else -}}
{{- printf "%s:%s" (include "atoll.name" (list . $called)) (ternary "7071" "7070" (eq $called "front")) | list | toJson -}}
{{- end -}}
{{- end }}

{{/* Whether `helm test` has a pod to run: not empty, or empty. */}}
{{- define "atoll.tests" -}}
{{- if or (and .Values.core.enabled .Values.core.viewerTlsSecret) .Values.learner.enabled }}yes{{ end -}}
{{- end }}
